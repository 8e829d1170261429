"""Finds leftovers of programs: threads, processes, ports, files."""

import tempfile
import threading
import traceback
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launchpad_lite.process.stacks import stacks_of_threads

#: Threads that are kept on purpose: grpc's pollers live as long as the process and carry
#: no call; ours for signals stays, as their handlers do.
_KEPT = ("signal-", "grpc", "pytest_timeout", "ThreadPoolExecutor", "asyncio_", "Dummy-", "pydevd")


@dataclass(frozen=True)
class Leftovers:
    """Threads, processes, ports and files that were not there before.

    Attributes:
        threads: Names of threads, with the stacks they are in.
        processes: Children, grandchildren included: pid and command line.
        ports: Listening TCP ports of this process.
        files: Files that this process holds open, and entries of the folder for temporary files
            that carry our name; not that of logs, which stay.

    Example:
        before = take_inventory()
        lp.launch(program, "test_mp").stop()
        assert not before.leftovers()
    """

    threads: Mapping[str, str]
    processes: Mapping[int, str]
    ports: Set[int]
    files: Set[str]

    def __bool__(self) -> bool:
        return bool(self.threads or self.processes or self.ports or self.files)

    def __str__(self) -> str:
        lines = [
            f"thread {name!r}, which is here:\n{stack}" for name, stack in self.threads.items()
        ]
        lines += [f"process {pid}: {command}" for pid, command in self.processes.items()]
        lines += [f"listening port {port}" for port in sorted(self.ports)]
        lines += [f"file {name}" for name in sorted(self.files)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Inventory:
    """An inventory of a moment."""

    threads: Set[int]
    processes: Set[int]
    ports: Set[int]
    files: Set[str]

    def leftovers(self) -> Leftovers:
        """Returns what came since and is still there."""
        now = take_inventory()
        with stacks_of_threads() as stacks:
            threads = {
                thread.name: "".join(traceback.StackSummary.extract(stacks[thread.ident]).format())
                for thread in threading.enumerate()
                if thread.ident not in self.threads
                and thread.ident in stacks
                and not thread.name.startswith(_KEPT)
                and not _is_grpc(thread)
            }
        return Leftovers(
            threads,
            {pid: _command(pid) for pid in now.processes - self.processes},
            now.ports - self.ports,
            now.files - self.files,
        )


def take_inventory() -> Inventory:
    """Returns the present inventory.

    Example:
        before = take_inventory()
        lp.launch(program, "test_mp").stop()
        assert not before.leftovers()
    """
    me = psutil.Process()
    return Inventory(
        {thread.ident for thread in threading.enumerate() if thread.ident is not None},
        {child.pid for child in me.children(recursive=True) if _is_alive(child)},
        {
            connection.laddr.port
            for connection in _connections(me)
            if connection.status == psutil.CONN_LISTEN
        },
        _files(me),
    )


def _connections(process: psutil.Process) -> list[Any]:
    # The name before psutil 6.
    ask = getattr(process, "net_connections", None) or process.connections
    return list(ask(kind="tcp"))


def _files(process: psutil.Process) -> set[str]:
    open_files = {file.path for file in process.open_files()}
    temporary = Path(tempfile.gettempdir()).glob("launchpad_lite*")
    # Not the default folder for logs, where other programs of this user add and remove some.
    kept = (each for each in temporary if not each.name.startswith("launchpad_lite-"))
    return open_files | {str(each) for each in kept}


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_grpc(thread: threading.Thread) -> bool:
    # grpc names some of its threads after its own functions only.
    target = getattr(thread, "_target", None)
    return (getattr(target, "__module__", None) or "").startswith("grpc")


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return "(ended meanwhile)"
