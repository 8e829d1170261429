"""The page of a program: served on loopback, for whoever has its token."""

import collections
import contextlib
import hmac
import http.server
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import courier
from courier.lowlevel import join_address, loopback
from launchpad_lite.errors import LaunchError
from launchpad_lite.insight._curves import Curves, label_of
from launchpad_lite.insight._prometheus import as_prometheus
from launchpad_lite.insight._view import (
    CallRates,
    LastLines,
    NodeRow,
    ProgramSight,
    ProgramView,
    plain,
    plain_lines,
)
from launchpad_lite.insight.history import FollowedHistory, RowMaker
from launchpad_lite.insight.top import PERIOD_S
from launchpad_lite.launching import NodeStatus, RunningProgram
from launchpad_lite.launching.flame_graph import ask_for_profiles, flame_graph, hottest
from launchpad_lite.launching.registry import Inspector
from launchpad_lite.parts.log_file import end_of, find_logs, log_path, log_pieces, read_log

_PAGE = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
#: Names of this machine in URLs. A page of a stranger whose name leads here has another one.
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
#: A look takes at most one part in so many of the time; what an answer costs other threads, in seconds.
_REST, _ANSWER_S = 40, 1e-4
#: Lines of logs that are shown, and bytes of each; connections that may be open.
_MOST_LINES, _MOST_LINE_BYTES, _MOST_CONNECTIONS = 500, 4096, 32
#: Seconds that a connection which is ended has to give up its place.
_LEAVES_S = 0.5
#: What is read of a log each second. A search reads all of it, which may take half a second.
_TAIL_BYTES = 1 << 20
_PROFILE_S = 2.0  # seconds for which the page samples a node


class ProgramPage:
    """What the page shows: of a program that runs, or of the folder of a run. Thread-safe.

    Looks only when it is asked to, and takes at most one part in 40 of the time.
    """

    def __init__(self, inspector: Inspector | None, folder: Path | None) -> None:
        self._lock = threading.Lock()
        self._inspector = inspector
        self._folder = folder
        self._view = None if inspector is None else ProgramView(inspector, folder)
        self._history = None if folder is None else FollowedHistory(folder)
        self._curves = Curves()
        self._make = RowMaker()  # while there is no history
        self._has_history = False
        self._sight = ProgramSight("", [], {})
        self._period_s, self._due_at = PERIOD_S, 0.0

    def state(self) -> dict[str, Any]:
        """Returns the nodes, and the calls between groups; `period_s` 0: nothing will change."""
        with self._lock:
            self._renew()
            sight = self._sight
            nodes = [_cells(row) for row in sight.rows]
            count, bad = collections.Counter[str](), collections.Counter[str]()
            for row in sight.rows:
                count[label_of(row.status.name)] += 1
                bad[label_of(row.status.name)] += row.status.state in ("failed", "restarting")
            edges: dict[tuple[str, str], float | None] = {
                (label_of(caller), label_of(callee)): None
                for caller, callees in self._curves.nodes.items()
                for callee in callees
            }
            for (caller, callee), calls_s in sight.edges.items():
                pair = label_of(caller), label_of(callee)
                edges[pair] = (edges.get(pair) or 0.0) + calls_s
            return {
                "title": plain(sight.title),
                "nodes": nodes,
                "groups": [[label, count[label], bad[label]] for label in count],
                "edges": [[*pair, c] for pair, c in edges.items() if count.keys() >= {*pair}],
                "folder": str(self._folder or ""),
                "period_s": self._period_s if self._view is not None else 0,
            }

    def _renew(self) -> None:
        if time.monotonic() < self._due_at:
            return
        began_at = time.thread_time()
        if self._view is not None and self._inspector is not None:
            try:
                has_ended = self._inspector.join(0.0)
                self._sight = self._view.look()
            except courier.CourierError:  # the process that supervised it has ended
                has_ended = True
            if has_ended:
                self._view = self._inspector = None
        has_changed = self._take_in_history()
        while self._view is None and self._take_in_history():
            has_changed = True  # all at once, because nobody asks for it again
        if self._view is None and (has_changed or not self._sight.rows):
            self._sight = self._last_sight()
        answers_s = _ANSWER_S * sum(bool(row.numbers) for row in self._sight.rows)
        self._period_s = max(PERIOD_S, _REST * (time.thread_time() - began_at + answers_s))
        self._due_at = time.monotonic() + 0.9 * self._period_s

    def _take_in_history(self) -> bool:
        is_other, rows = (False, []) if self._history is None else self._history.read()
        if is_other:
            self._curves.clear()
        self._has_history |= bool(rows)
        if self._view is not None and not self._has_history:
            nodes = [row.status for row in self._sight.rows]
            numbers = {row.status.name: row.numbers for row in self._sight.rows if row.numbers}
            rows = [*self._make.of_states(nodes), *self._make.of_numbers(numbers, nodes)]
        self._curves.take_in(rows)
        return bool(rows)

    def _last_sight(self) -> ProgramSight:
        """Returns a program that has ended, as its folder tells."""
        curves, folder = self._curves, self._folder
        end = curves.end or {"reason": "no end of it is known"}
        found, lines = dict(curves.states), LastLines(folder)
        if not found and folder is not None:
            found = {node: {} for node, _ in find_logs(folder)}
        rows = []
        for node, row in found.items():
            status = NodeStatus(
                node, row.get("state", "ended"), row.get("host", ""), None, {}, row.get("restarts", 0),
                row.get("cpu"), row.get("mib"), since=row.get("t"), gpu_memory_mib=row.get("gpu_mib"),
            )  # fmt: skip
            rates = curves.rates.get(node, {})
            known = CallRates(*(rates.get(name) for name in CallRates._fields))
            rows.append(NodeRow(status, known, lines.of(node), {}))
        return ProgramSight(f"{curves.program or folder}: {end['reason']}", rows, curves.edges)

    def curves(self) -> dict[str, Any]:
        """Returns the charts, and views of nodes as text."""
        with self._lock:
            self._renew()
            return {"charts": self._curves.charts(), "views": self._curves.views()}

    def logs(self, node: str, search: str) -> str:
        """Returns the last lines of a node, those with a text if one is given."""
        word = search.lower().encode()
        lines: Iterator[bytes] = iter(())
        if self._folder is not None and node in {row.status.name for row in self._sight.rows}:
            path = log_path(self._folder, node)
            lines = read_log(path) if word else iter(_tail(path))
        chosen = (line.rstrip(b"\n")[:_MOST_LINE_BYTES] for line in lines if word in line.lower())
        found = collections.deque(chosen, _MOST_LINES)
        return b"\n".join(found).decode(errors="replace").rstrip() or "no such lines are kept"

    def stacks(self, node: str) -> str:
        """Returns where the threads of a node are."""
        inspector = self._inspector
        return inspector.stacks().get(node, "it does not answer") if inspector else "it has ended"

    def profile(self, node: str) -> dict[str, str]:
        """Returns where the threads of a node spend their time now, as text and as a flame graph."""
        if (inspector := self._inspector) is None:
            return {"text": "it has ended"}
        profiles = ask_for_profiles(inspector.ask, [node], _PROFILE_S)
        return {"text": plain_lines(hottest(profiles)), "svg": flame_graph(profiles)}

    def why(self) -> str:
        """Returns who waits for whom; of a run that has failed, its report."""
        if (inspector := self._inspector) is not None:
            return inspector.why()
        if self._folder is None or not (report := self._folder / "report.txt").is_file():
            return "it has ended"
        return report.read_text(errors="replace")

    def numbers(self, node: str) -> str:
        """Returns all that a node has told of its calls and metrics."""
        found = next((row.numbers for row in self._sight.rows if row.status.name == node), {})
        return json.dumps(found, indent=2, ensure_ascii=False)

    def metrics(self) -> str:
        """Returns all numbers in the text format of Prometheus."""
        with self._lock:
            self._renew()
            return as_prometheus(self._sight)


def _tail(path: Path) -> list[bytes]:
    data = b""
    for piece in reversed(log_pieces(path)):
        with piece.open("rb") as file:
            data = end_of(file, _TAIL_BYTES - len(data)) + data
    return data.split(b"\n")


def _cells(row: NodeRow) -> list[Any]:
    status = row.status
    usage = (status.restarts, status.cpu, status.memory_mib, status.gpu_memory_mib)
    return [status.name, status.state, status.host, *usage, *row.rates, row.last_line]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: "PageServer"
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "launchpad-lite", ""
    timeout = 30  # seconds that a connection may be silent

    def do_GET(self) -> None:
        """Answers a request."""
        place = urlsplit(self.path)
        name = place.path.removeprefix("/") or "index.html"
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, {"error": "this is another host"})
        elif name in ("index.html", "page.js", "page.css"):
            file = _PAGE / name
            self._send(HTTPStatus.OK, file.read_bytes(), _KINDS[file.suffix])
        elif not self._has_token():
            text = "open the page by the link that was printed: it has the token"
            self._answer(HTTPStatus.UNAUTHORIZED, {"error": text})
        else:
            self.server.unproven.pop(self.connection, None)
            given = {key: values[-1] for key, values in parse_qs(place.query).items()}
            self._answer_to(name, given.get("node", ""), given.get("search", ""))

    def _answer_to(self, name: str, node: str, search: str) -> None:
        page = self.server.page
        answers: dict[str, Callable[[], Mapping[str, Any]]] = {
            "api/state": page.state,
            "api/curves": page.curves,
            "api/profile": lambda: page.profile(node),
            "api/logs": lambda: {"text": plain_lines(page.logs(node, search))},
            "api/stacks": lambda: {"text": plain_lines(page.stacks(node))},
            "api/numbers": lambda: {"text": plain_lines(page.numbers(node))},
            "api/why": lambda: {"text": plain_lines(page.why())},
        }
        try:
            if name == "metrics":
                kind = "text/plain; version=0.0.4"
                self._send(HTTPStatus.OK, page.metrics().encode(), kind)
            elif name in answers:
                self._answer(HTTPStatus.OK, answers[name]())
            else:
                self._answer(HTTPStatus.NOT_FOUND, {"error": f"there is no {plain(name)}"})
        except (LaunchError, courier.CourierError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": plain_lines(str(error))})
        except Exception as error:  # noqa: BLE001 - as of a history that another program wrote
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": plain_lines(repr(error))})

    def _has_token(self) -> bool:
        expected = f"Bearer {self.server.token}".encode()
        given = self.headers.get("Authorization", "").encode(errors="replace")
        return hmac.compare_digest(given, expected)

    def _answer(self, status: HTTPStatus, value: Mapping[str, Any]) -> None:
        data = json.dumps(value, separators=(",", ":")).encode()
        self._send(status, data, "application/json")

    def _send(self, status: HTTPStatus, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Says nothing: each request would be a line."""


class PageServer(socketserver.ThreadingTCPServer):
    """Serves a page on loopback, in threads of its own."""

    daemon_threads = allow_reuse_address = True
    block_on_close = False
    request_queue_size = 128  # connections that wait to be accepted

    timeout = 0.5  # seconds after which it notices that it is to end

    def __init__(self, page: ProgramPage, port: int = 0, until: Callable[[], bool] = bool) -> None:
        """Begins to serve, until a function returns true; OSError if the port is taken, 0 takes any."""
        here = loopback()
        if ":" in here:
            self.address_family = socket.AF_INET6
        self.page = page
        self.token = secrets.token_urlsafe(24)
        self._until = until
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        #: Connections without a request with the token so far, the oldest first.
        self.unproven: dict[socket.socket, None] = {}
        super().__init__((here, port), _Handler)
        #: The link with the token.
        self.url = f"http://{join_address(here, self.server_address[1])}/#{self.token}"
        threading.Thread(target=self._serve, name="launchpad-page", daemon=True).start()

    def _serve(self) -> None:
        with self:
            while not self._until():
                self.handle_request()

    def verify_request(self, request: Any, _: object) -> bool:
        """Refuses connections beyond a limit; before, ends the oldest that may be of a stranger."""
        is_free = self._free.acquire(blocking=False)
        while not is_free and (oldest := next(iter(list(self.unproven)), None)) is not None:
            self.unproven.pop(oldest, None)
            with contextlib.suppress(OSError):  # it is closed already
                oldest.shutdown(socket.SHUT_RDWR)
            is_free = self._free.acquire(timeout=_LEAVES_S)
        if is_free:
            self.unproven[request] = None
        return is_free

    def process_request_thread(self, request: Any, address: Any) -> None:
        """Serves one connection."""
        try:
            super().process_request_thread(request, address)
        finally:
            self.unproven.pop(request, None)
            self._free.release()

    def handle_error(self, *args: object) -> None:
        """Says nothing: a browser may close connections at any time."""


def serve(running: RunningProgram) -> str:
    """Serves the page of a program that this process launched; returns its link."""
    page = ProgramPage(Inspector(running), running.log_dir)
    return PageServer(page, until=lambda: running.join(0)).url


def show_dashboard(inspector: Inspector | None, folder: Path | None, port: int) -> None:
    """Serves the page of a program of another process, or of a folder, until Ctrl-C."""
    try:
        server = PageServer(ProgramPage(inspector, folder), port)
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"cannot serve at port {port}: {error}; name another: --port=0"
        ) from error
    print(f"{server.url}\nCtrl-C ends it", flush=True)  # noqa: T201 - what a command line is for
    threading.Event().wait()
