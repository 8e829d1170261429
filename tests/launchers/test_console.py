"""What the console does with output that a reader does not take."""

import os
import threading
import time

import pytest

from launchers.supervision.console import Console, Writer


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


def test_short_lines_are_made_where_they_are_written_and_are_whole_though_some_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _Pipe() as pipe:
        monkeypatch.setattr("launchers.supervision.console._OUT", pipe.writer)
        console = Console()
        console.show("flood[0]", b"begun")
        began = time.thread_time()
        for _ in range(300):  # three times as much as may wait; nobody reads
            console.show("flood[0]", b"\n" * 1000)
        assert time.thread_time() - began < 0.1  # to make these lines takes half a second
        console.show("flood[0]", b"rest")
        *first, missing = pipe.read()
        console.show("flood[0]", b"a line\nbegun")
        console.finish("flood[0]")
        last = pipe.read()
    assert 100_000 < len(first) < 110_000
    assert first == ["[flood[0]] begun", *["[flood[0]] "] * (len(first) - 1)]
    assert missing == f"({300_001 - len(first)} missing)"
    assert last == ["[flood[0]] a line", "[flood[0]] begun"]
