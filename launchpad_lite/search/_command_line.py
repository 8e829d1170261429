"""`python -m launchpad_lite.search`: a worker that joins a running search."""

import argparse
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import courier
from launchpad_lite.errors import LaunchpadError
from launchpad_lite.search._devices import DeviceWish
from launchpad_lite.search._joining import JOIN_FILE, JoinInfo, OutsideWorker, name_here
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.running import MAX_RESULT_BYTES

_SECRET = "LAUNCHPAD_SEARCH_SECRET"  # noqa: S105 - the name of a variable
#: Seconds between two looks whether a worker that is to end has noticed it.
_LOOK_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0 if the worker has left in order, or is right.

    Args:
        argv: Arguments without the program's name; by default those of this process.
    """
    # As `python -m` does: tasks come from modules that lie where one works.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        options = _parser().parse_args(argv)
        if options.command == "check-worker":
            from launchpad_lite.search._checking import Checks

            with tempfile.TemporaryDirectory() as folder:
                return 0 if Checks(options, Path(folder)).run() else 1
        _work(options)
    except (LaunchpadError, courier.CourierError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - what a command line is for
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
    worker.add_argument(
        "--device-share",
        type=float,
        metavar="PART",
        help="claims this part of a device that no other worker has, and sees only that one: 1, 0.5",
    )
    worker.add_argument(
        "--devices",
        type=lambda text: tuple(filter(None, text.split(","))),
        metavar="LIST",
        help="which ones it may claim, as CUDA_VISIBLE_DEVICES names them; by default all",
    )
    check = commands.add_parser("check-worker", help="check a worker in another language")
    check.add_argument("--kind", required=True, help="of the tasks that it takes")
    for name, what in (("", "does"), ("long-", "does in 5 s or more"), ("bad-", "cannot do")):
        text = f"file with the payload of a task that it {what}"
        check.add_argument(f"--{name}payload", type=lambda file: Path(file).read_bytes(), help=text)
    check.add_argument("--patience-s", type=float, default=30.0, help="seconds for each step")
    check.add_argument("worker", nargs="+", help="its command; the path of a join.json is added")
    return parser


def _work(options: argparse.Namespace) -> None:
    stop = threading.Event()
    with _Signals(stop) as signals:
        info = _info(options)
        name = options.name or name_here()
        worker = OutsideWorker(info, name, stop, MAX_RESULT_BYTES, _wish(options))
        signals.wake = worker.wake
        print(f"{name} works for the search at {info.address}", file=sys.stderr)  # noqa: T201
        worker.run()


def _wish(options: argparse.Namespace) -> DeviceWish | None:
    """Returns which device the worker needs.

    Raises:
        SearchError: It is not a part of one.
    """
    if options.device_share is None and not options.devices:
        return None
    try:
        share = 1.0 if options.device_share is None else options.device_share
        return DeviceWish(share, options.devices or None)
    except ValueError as error:
        raise SearchError(f"--device-share: {error}") from error


def _info(options: argparse.Namespace) -> JoinInfo:
    """Returns what lets the worker into the search.

    Raises:
        SearchError: The command line does not say it.
    """
    address: str = options.address
    if os.sep in address or address.endswith(".json") or Path(address).is_file():
        return JoinInfo.read(Path(address))
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
        return JoinInfo(_checked(address), courier.Secret(bytes.fromhex(text.strip())))
    except ValueError as error:
        raise SearchError(f"the secret in {source} is none: {error}") from error


def _checked(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise SearchError(f"{address!r} is neither host:port nor a file {JOIN_FILE}")
    return address


class _Signals:
    """Sets an event at the first Ctrl-C or SIGTERM in a block, and ends the process at the second.

    A thread does it, because the main thread may be in the middle of anything.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        #: Has who waits look at the event; several times, for it may be just about to wait.
        self.wake: Callable[[], object] = lambda: None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def __enter__(self) -> "_Signals":
        threading.Thread(target=self._watch, name="search-signals", daemon=True).start()
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        # Processes that tasks fork are no workers.
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
