"""What the console does with output that a reader does not take."""

import os
import threading

from launchers._console import Writer


class _Pipe:
    """A pipe, and a writer to it; a context manager."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()
        self.writer = Writer(lambda: self.sink, lambda lines: b"(%d missing)\n" % lines)

    def __enter__(self) -> "_Pipe":
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.source)  # whoever writes gives up
        self.writer.drain(lambda: 20.0)
        os.close(self.sink)

    def put(self, lines: int) -> None:
        for number in range(lines):
            self.writer.put(b"%07d" % number + b"x" * ((1 << 18) - 8) + b"\n")

    def read(self) -> list[str]:
        """Reads until all is written."""
        said = bytearray()

        def read() -> None:
            while not said.endswith(b"\nend\n"):
                said.extend(os.read(self.source, 1 << 20))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert self.writer.drain(lambda: 20.0) == 0
        os.write(self.sink, b"end\n")
        reader.join()
        return [line.rstrip("x") for line in said.decode().splitlines()[:-1]]


def test_what_a_slow_reader_does_not_take_in_time_is_dropped_counted_and_named_in_its_place() -> (
    None
):
    with _Pipe() as pipe:
        pipe.put(100)  # 25 MiB
        first = pipe.read()
        pipe.put(1)
        assert pipe.read() == ["0000000"]
    *lines, missing = first
    assert lines == [f"{number:07}" for number in range(len(lines))]
    assert 60 <= len(lines) < 70
    assert missing == f"({100 - len(lines)} missing)"
