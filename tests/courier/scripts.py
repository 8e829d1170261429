"""Other processes of a test, of which none outlives it."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence

Start = Callable[[Sequence[str]], "subprocess.Popen[str]"]


@contextlib.contextmanager
def started() -> Iterator[Start]:
    """Gives a function that starts commands with pipes; kills at the end what still runs."""
    processes: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.communicate()
