"""What the console does with output that has no lines, or nowhere to go."""

import io
import os
import sys
import threading

import pytest

from launchers._console import Console, Writer, show_rest


@pytest.mark.parametrize("closed", [True, False])
def test_a_console_that_is_gone_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream if closed else None)
    Console().show("node[0]", b"text\n")


def test_a_line_without_end_is_shown_in_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    for _ in range(100):
        console.show("bar[0]", b"#" * 65535)
    console.finish("bar[0]")
    show_rest(10.0, lambda: False)
    assert sum(line.count("#") for line in capsys.readouterr().out.splitlines()) == 6553500


def test_elsewhere_than_on_a_terminal_a_bar_is_its_last_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console()
    for percent in range(101):
        console.show("bar[0]", b"\r%d%%" % percent)
    console.show("bar[0]", b"\n")
    console.show("bar[0]", b"\r7%")
    console.show("bar[0]", b"\r8%")
    console.finish("bar[0]")
    show_rest(10.0, lambda: False)
    assert capsys.readouterr().out == "[bar[0]] 100%\n[bar[0]] 8%\n"


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


def test_a_reader_that_takes_nothing_is_waited_for_no_longer_than_that() -> None:
    with _Pipe() as pipe:
        pipe.put(100)
        assert pipe.writer.drain(lambda: 0.2) == 100
