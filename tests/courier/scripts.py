"""Other processes of a test, of which none outlives it."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence


class Process(subprocess.Popen[str]):
    """Another process, which talks with the test by lines."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def line(self) -> str:
        """Returns the next line that it prints."""
        assert self.stdout is not None
        line = self.stdout.readline()
        assert line, self.communicate()[1]
        return line.strip()

    def say(self) -> None:
        """Has it read an empty line."""
        assert self.stdin is not None
        print(file=self.stdin, flush=True)

    def output(self, said: str | None = None) -> str:
        """Returns what it prints until it ends, which it does well."""
        out, err = self.communicate(said, timeout=100)
        assert self.returncode == 0, err
        return out.strip()


@contextlib.contextmanager
def started() -> Iterator[Callable[[Sequence[str]], Process]]:
    """Gives a function that starts commands with pipes; kills at the end what still runs."""
    with contextlib.ExitStack() as stack:

        def start(command: Sequence[str]) -> Process:
            process = Process(command)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start
