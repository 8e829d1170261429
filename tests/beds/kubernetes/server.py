"""The API server at the HTTP edge: requests of the official client."""

import contextlib
import json
import re
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.beds.kubernetes import admission, selectors
from tests.beds.kubernetes.logs import Log, read
from tests.beds.kubernetes.network import SERVICES, ServiceNetwork
from tests.beds.kubernetes.store import RESOURCES, ApiError, Change, Object, Resource, Store

Rules = frozenset[tuple[str, str]]
"""What a token may do: pairs of verb and resource, like ("get", "pods/log")."""

_USER = "researcher"


class ApiServer:
    """Serves a store on loopback, until `close`.

    Args:
        store: What it serves.
        namespace: The one there is.
        read_log: Given a pod and the name of a container, where its log is and whether more may
            come; raises ApiError where there is none.
        services: Addresses of services.

    Attributes:
        tokens: What each token may do; None: all.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        read_log: Callable[[Object, str], Log],
        services: ServiceNetwork = SERVICES,
    ) -> None:
        self.store = store
        self._addresses = services
        self.namespace = namespace
        self.read_log = read_log
        self.tokens: dict[str, Rules | None] = {}
        self.streams: dict[str, set[socket.socket]] = {"watch": set(), "log": set()}
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self._services = 0

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that has gone is no news."""

        api = self

        class Handler(_Handler):
            server_api = api

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="api server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        with self.store.changed:
            self.store.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for kind in self.streams:
            self.drop(kind)

    def drop(self, kind: str) -> None:
        """Cuts all open connections of a kind, as a lost network does: no last chunk."""
        with self.lock:
            streams = list(self.streams[kind])
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def admit(self, resource: str, item: Object, *, is_dry: bool = False) -> Object:
        """Creates an object as a request would, or only judges it; also for controllers."""
        admission.check_structure(resource, item)
        item = json.loads(json.dumps(item))
        admission.fill(resource, item)
        if resource == "services" and item["spec"].get("clusterIP") in (None, ""):
            self._services += 1
            item["spec"]["clusterIP"] = str(self._addresses[self._services + 20])
        return self.store.create(resource, item, is_dry=is_dry)


@dataclass(frozen=True)
class _Target:
    """What the path of a request names."""

    resource: Resource
    namespace: str
    name: str = ""
    subresource: str = ""


_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[a-z]+))?)?"
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_api: ApiServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is inherited
        """Nobody reads it; `requests` holds what tests ask for."""

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = {key: values[-1] for key, values in urllib.parse.parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        try:
            body = self.rfile.read(length)
            document = json.loads(body) if body else None
            self._serve(url.path, query, document)
        except ApiError as error:
            self._answer(error.status, error.code)

    # The names are the base class's.
    do_GET = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815

    def _serve(self, path: str, query: dict[str, str], body: Any) -> None:
        api = self.server_api
        header = self.headers.get("Authorization", "")
        token = header.removeprefix("Bearer ")
        if token not in api.tokens:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        target = self._target(path)
        if target is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        self._authorize(target, query, api.tokens[token])
        if self.command == "GET" and target.subresource == "log":
            self._send_log(target, query)
        elif self.command == "GET" and not target.name:
            self._list(target, query)
        elif self.command == "GET":
            self._answer(api.store.get(target.resource.plural, target.namespace, target.name))
        elif self.command == "POST":
            self._create(target, query, body)
        elif self.command == "PATCH":
            self._change(target, body)
        else:
            self._delete(target, query, body or {})

    def _target(self, path: str) -> _Target | None:
        found = _PATH.fullmatch(path)
        if not found:
            return None
        resource = RESOURCES.get(found["plural"])
        group, version = found["group"] or "", found["core"] or found["version"]
        if resource is None or (resource.group, resource.version) != (group, version):
            return None
        return _Target(resource, found["namespace"], found["name"] or "", found["sub"] or "")

    def _authorize(self, target: _Target, query: Mapping[str, str], rules: Rules | None) -> None:
        if rules is None:
            return
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(self.command, "")
        if self.command == "GET":
            verb = "get" if target.name else "watch" if _is_true(query.get("watch")) else "list"
        resource = target.resource.plural
        if target.subresource:
            resource += f"/{target.subresource}"
        inside = target.namespace == self.server_api.namespace
        if (verb, resource) in rules and inside:
            return
        name = f' "{target.name}"' if target.name else ""
        where = f'in the namespace "{target.namespace}"'
        raise ApiError(
            403,
            "Forbidden",
            f'{target.resource.qualified}{name} is forbidden: User "{_USER}" cannot {verb} resource '
            f'"{resource}" in API group "{target.resource.group}" {where}',
        )

    def _create(self, target: _Target, query: Mapping[str, str], body: Any) -> None:
        body["metadata"].setdefault("namespace", target.namespace)
        body.setdefault("apiVersion", target.resource.api_version)
        body.setdefault("kind", target.resource.kind)
        is_dry = query.get("dryRun") == "All"
        self._answer(self.server_api.admit(target.resource.plural, body, is_dry=is_dry), 201)

    def _change(self, target: _Target, body: Any) -> None:
        """Merges: for what tests change, a strategic merge patch means the same."""
        plural = target.resource.plural

        def change(item: Object) -> None:
            new = _merged(item, body)
            admission.check_structure(
                plural, {key: value for key, value in new.items() if key != "status"}
            )
            item.clear()
            item.update(new)

        store = self.server_api.store
        self._answer(store.update(plural, target.namespace, target.name, change))

    def _delete(
        self, target: _Target, query: Mapping[str, str], options: Mapping[str, Any]
    ) -> None:
        store = self.server_api.store
        plural = target.resource.plural
        item = store.get(plural, target.namespace, target.name)
        grace = options.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
        policy = options.get("propagationPolicy") or query.get("propagationPolicy")
        assert policy == "Background" or plural != "jobs", "what it owns would stay"
        wanted = (options.get("preconditions") or {}).get("uid")
        metadata = item["metadata"]
        if wanted and wanted != metadata["uid"]:
            raise ApiError(409, "Conflict", "the UID in the precondition does not match")
        grace_s = None if grace is None else int(grace)
        store.delete(plural, target.namespace, target.name, grace_s=grace_s, uid=metadata["uid"])
        self._answer(store.find(plural, target.namespace, target.name) or item)

    def _selected(self, target: _Target, query: Mapping[str, str]) -> list[Object]:
        keeps = _filter(query)
        found = self.server_api.store.items(target.resource.plural, target.namespace)
        return [item for item in found if keeps(item)]

    def _list(self, target: _Target, query: Mapping[str, str]) -> None:
        store = self.server_api.store
        if _is_true(query.get("watch")):
            self._watch(target, query)
            return
        with store.changed:
            items = self._selected(target, query)
            version = store.version
        metadata: dict[str, Any] = {"resourceVersion": str(version)}
        known = target.resource
        bare = [
            {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}
            for item in items
        ]
        self._answer(
            {
                "kind": f"{known.kind}List",
                "apiVersion": known.api_version,
                "metadata": metadata,
                "items": bare,
            }
        )

    def _watch(self, target: _Target, query: Mapping[str, str]) -> None:
        api, store = self.server_api, self.server_api.store
        keeps = _filter(query)
        plural = target.resource.plural
        ends_at = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
        version = int(query["resourceVersion"])
        with self._stream("watch", "application/json") as send:
            while True:
                with store.changed:
                    changes = store.changes_since(version)
                    if not changes:
                        store.changed.wait(max(min(ends_at - time.monotonic(), 0.5), 0))
                        changes = store.changes_since(version)
                if api.closing.is_set():
                    return
                for change in changes:
                    version = change.version
                    if change.resource == plural and (event := _seen(change, keeps, target)):
                        send(_event(*event))
                # Not before: what had happened when it began is told, however late it is.
                if time.monotonic() > ends_at or (not changes and self._is_gone()):
                    return

    def _send_log(self, target: _Target, query: Mapping[str, str]) -> None:
        api = self.server_api
        pod = api.store.get("pods", target.namespace, target.name)
        log = api.read_log(pod, query["container"])
        with self._stream("log", "text/plain") as send:
            for piece in read(log.path, log.open, query):
                if piece:
                    send(piece)
                elif api.closing.is_set() or self._is_gone():
                    return

    def _is_gone(self) -> bool:
        """Whether the client has closed its end."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    @contextlib.contextmanager
    def _stream(self, kind: str, content: str) -> Iterator[Callable[[bytes], None]]:
        api = self.server_api
        with api.lock:
            api.streams[kind].add(self.connection)
        try:
            self.send_response(200)
            self.send_header("Content-Type", content)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

            def send(data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

            yield send
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
        finally:
            with api.lock:
                api.streams[kind].discard(self.connection)

    def _answer(self, document: Any, code: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)


def evict(store: Store, pod: Object) -> None:
    """What the eviction API does: says why, then deletes."""
    _disrupt(store, pod, "EvictionByEvictionAPI", "Eviction API: evicting")


def give_up(store: Store, pod: Object) -> None:
    """What is done to pods whose node is not ready: says why, then deletes."""
    message = "Taint manager: deleting due to NoExecute taint"
    _disrupt(store, pod, "DeletionByTaintManager", message)


def _disrupt(store: Store, pod: Object, reason: str, message: str) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    metadata = pod["metadata"]

    def mark(item: Object) -> None:
        conditions = item.setdefault("status", {}).setdefault("conditions", [])
        if not any(one["type"] == "DisruptionTarget" for one in conditions):
            conditions.append(condition)

    store.update("pods", metadata["namespace"], metadata["name"], mark, uid=metadata["uid"])
    store.delete("pods", metadata["namespace"], metadata["name"], uid=metadata["uid"])


def _filter(query: Mapping[str, str]) -> Callable[[Mapping[str, Any]], bool]:
    labels = selectors.pairs(query.get("labelSelector", "")).items()
    fields = selectors.pairs(query.get("fieldSelector", "")).items()
    return lambda item: (
        labels <= (item["metadata"].get("labels") or {}).items()
        and all(item.get(name) == value for name, value in fields)
    )


def _seen(
    change: Change, keeps: Callable[[Mapping[str, Any]], bool], target: _Target
) -> tuple[str, Object] | None:
    """A change as a watch with selectors sees it."""
    if change.new["metadata"]["namespace"] != target.namespace:
        return None
    before = change.old is not None and keeps(change.old)
    if change.kind == "DELETED":
        return ("DELETED", change.new) if before else None
    after = keeps(change.new)
    if after:
        return ("MODIFIED" if before else "ADDED", change.new)
    return ("DELETED", change.new) if before else None


def _event(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _is_true(text: str | None) -> bool:
    return (text or "").lower() in ("true", "1")


def _merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result
