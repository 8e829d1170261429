"""`python -m launchpad_lite.search`: a worker that joins a running search; what a search has found."""

import argparse
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import courier
from courier.lowlevel import split_address
from launchpad_lite.errors import LaunchpadError
from launchpad_lite.parts.escapes import shown
from launchpad_lite.parts.joining import JOIN_FILE, JoinInfo
from launchpad_lite.search._presence import Presence
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.looking import look, read_join_file, timing_of
from launchpad_lite.search.results import Result, row_of
from launchpad_lite.search.worker import Worker

_SECRET = "LAUNCHPAD_SEARCH_SECRET"  # noqa: S105 - the name of a variable
#: Seconds between two checks that a worker has noticed that it is to end.
_LOOK_S = 0.2
#: Seconds between two loads of the checkpoint of a search.
_FOLLOW_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 for an error, or that of a signal."""
    # Also where Python does not do it: tasks come from modules in the working directory.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        options = _parser().parse_args(argv)
        for text in options.run(options) or ():
            print(shown(text), end="", flush=True)  # noqa: T201 - what a command line is for
    except (KeyboardInterrupt, BrokenPipeError) as error:  # Python flushes once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + (signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGPIPE)
    except (LaunchpadError, courier.CourierError, OSError) as error:
        print(shown(f"error: {error}"), file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m launchpad_lite.search")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    worker = commands.add_parser(
        "worker",
        help="run tasks of a search until it is over",
        description="Runs tasks of a running search. Ctrl-C or SIGTERM: it leaves after its task; a "
        "second one ends it at once.",
    )
    worker.set_defaults(run=_work)
    worker.add_argument(
        "address",
        metavar="ADDRESS",
        help=f"path of the file {JOIN_FILE} in the folder of the search; or host:port of its name "
        f"server, with the secret from --secret-file or the variable {_SECRET}",
    )
    worker.add_argument(
        "--secret-file", type=Path, metavar="FILE", help="holds the secret as hexadecimal digits"
    )
    worker.add_argument("--name", default="", help="of this worker; no other one may have it")
    for name, run, text in (
        ("show", _show, "print what a search has found, or all about a trial"),
        ("tail", _tail, "print trials as they end, or what the task of a trial prints"),
        ("export", _export, "write a table of the trials"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("folder", type=Path, metavar="FOLDER", help="of the search")
        if run is _show:
            command.add_argument("--json", action="store_true", help="print JSON")
        if run is not _export:
            command.add_argument("trial", type=int, nargs="?", metavar="TRIAL", help="its number")
    command.add_argument("--format", choices=("csv", "json"), default="csv")
    command.add_argument("-o", dest="output", type=Path, metavar="FILE", help="by default stdout")
    check = commands.add_parser("check-worker", help="check a worker in another language")
    check.set_defaults(run=_check)
    check.add_argument("--kind", required=True, help="of the tasks that it takes")
    for name, what in (("", "does"), ("long-", "does in 5 s or more"), ("bad-", "cannot do")):
        text = f"file with the payload of a task that it {what}"
        check.add_argument(f"--{name}payload", type=lambda file: Path(file).read_bytes(), help=text)
    check.add_argument("--patience-s", type=float, default=30.0, help="seconds for each step")
    check.add_argument("worker", nargs="+", help="its command; the path of a join.json is added")
    return parser


def _show(options: argparse.Namespace) -> Iterator[str]:
    result, _ = look(options.folder)
    if options.trial is None and not options.json:
        yield f"{options.folder}: {result.state}\n{result!r}\n"
        return
    log = None if options.trial is None else _log_of(result, options.trial)
    trials = result.trials if log is None else [result.trials[options.trial]]
    rows = [row_of(each) | {"curve": each.curve} for each in trials]
    if options.json:
        about = {"format": 1, "folder": str(options.folder), "state": result.state}
        yield json.dumps({**about, "trials": rows}, default=repr) + "\n"
    elif log is not None:
        row = rows[0] | {"folder": log.parent, "log": log}
        row["error"] = row.pop("error")  # last: it has many lines
        yield "".join(f"{name:<13} {value}\n" for name, value in row.items())


def _log_of(result: Result, number: int) -> Path:
    if not 0 <= number < len(result.trials):
        raise SearchError(f"{result.folder} has the trials 0 to {len(result.trials) - 1}")
    return result.folder_of(result.trials[number]) / "log"


def _tail(options: argparse.Namespace) -> Iterator[str]:
    known, size, is_over = set[int](), 0, False
    while not is_over:
        result, _ = look(options.folder)
        is_over = result.state in ("complete", "failed", "stopped")
        if options.trial is not None:
            log = _log_of(result, options.trial)
            is_over |= result.trials[options.trial].told_at is not None
            if log.exists():
                with log.open("rb") as file:
                    file.seek(size)
                    yield file.read().decode(errors="replace")
                    size = file.tell()
            elif is_over:
                raise SearchError(f"trial {options.trial} has no log: there is no {log}")
        for trial in result.trials if options.trial is None else ():
            if trial.told_at is not None and trial.number not in known:
                known.add(trial.number)
                row = f"{trial.number:>6} {trial.state.value:<8}{trial.score!s:<24}"
                yield f"{row}{dict(trial.params)}"[:79] + "\n"
        time.sleep(0.0 if is_over else _FOLLOW_S)


def _export(options: argparse.Namespace) -> Iterator[str]:
    result, _ = look(options.folder)
    rows = [row_of(each) | {"curve": each.curve} for each in result.trials]
    text = result.as_csv() if options.format == "csv" else json.dumps(rows, default=repr)
    if options.output is None:
        yield text
    else:
        options.output.write_text(text, encoding="utf-8")


def _check(options: argparse.Namespace) -> None:
    from launchpad_lite.search._checking import Checks

    with tempfile.TemporaryDirectory() as folder:
        if not Checks(options, Path(folder)).run():
            raise SearchError("the worker does not do what it has to")


def _work(options: argparse.Namespace) -> None:
    stop = threading.Event()
    with _WorkerSignals(stop) as signals:
        info = _info(options)
        name = options.name or f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
        worker = outside_worker(info, name, stop)
        signals.wake = worker.wake
        print(f"{name} works for the search at {info.address}", file=sys.stderr)  # noqa: T201
        worker.run()


def outside_worker(info: JoinInfo, name: str, stop: threading.Event) -> Worker:
    """Returns a worker that belongs to no program; once `stop` is set, it ends after its task."""
    presence = Presence("worker", name, info.connect(), {}, timing_of(info), info.connect)
    return Worker(presence, stop)


def _info(options: argparse.Namespace) -> JoinInfo:
    address: str = options.address
    if os.sep in address or address.endswith(".json") or Path(address).is_file():
        return read_join_file(Path(address))
    if options.secret_file is not None:
        source = str(options.secret_file)
        try:
            text = options.secret_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SearchError(f"cannot read the secret from {source}: {error}") from error
    else:
        source, text = _SECRET, os.environ.get(_SECRET, "")
    if not text.strip():
        raise SearchError(
            f"no secret for {address}: give it in a file by --secret-file, or in the variable {_SECRET}, "
            f"or name the file {JOIN_FILE} of the search in place of its address"
        )
    try:
        split_address(address)
    except ValueError as error:
        raise SearchError(f"{address!r} is neither host:port nor a file {JOIN_FILE}") from error
    try:
        return JoinInfo(address, courier.Secret(bytes.fromhex(text.strip())))
    except ValueError as error:
        raise SearchError(f"the secret in {source} is none: {error}") from error


class _WorkerSignals:
    """Sets an event at the first Ctrl-C or SIGTERM in a block, and ends the process at the second.

    A thread does it, because the main thread may hold any lock.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        #: Wakes the waiting thread; several times, because it may be just about to wait.
        self.wake: Callable[[], object] = lambda: None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def __enter__(self) -> "_WorkerSignals":
        threading.Thread(target=self._watch, name="search-signals", daemon=True).start()
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        # Processes that tasks fork are not workers.
        os.register_at_fork(after_in_child=_as_usual)
        return self

    def __exit__(self, *exc: object) -> None:
        _as_usual()

    def _watch(self) -> None:
        self._take()
        self._stop.set()
        print("leaves after its task; once more ends it at once", file=sys.stderr)  # noqa: T201
        while True:
            self.wake()
            if select.select([self._reader], [], [], _LOOK_S)[0]:
                os._exit(128 + self._take())

    def _take(self) -> int:
        # Signals that tasks handle arrive here, too.
        while (number := os.read(self._reader, 1)[0]) not in _SIGNALS:
            pass
        return number


def _as_usual() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
