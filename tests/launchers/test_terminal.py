"""Progress bars: which lines they become, and how a terminal shows them meanwhile."""

import fcntl
import os
import pty
import signal
import struct
import termios
import threading
from pathlib import Path

import pyte
import pytest

from launchers.supervision._terminal import Lines, LiveLines
from launchpad_lite.testing import poll_until
from tests.launchers.scripts import Script


@pytest.mark.parametrize(
    ("output", "lines", "unfinished"),
    [
        (b"one\ntwo\n\nthr", [b"one", b"two", b""], [b"thr"]),
        (b"\r 10%\r 20%", [], [b" 20%"]),
        (b"\r 10%\r100%\nnext\n", [b"100%", b"next"], []),
        (b"10%\r20%\r", [], [b"20%"]),  # the return may come last
        (b"of Windows\r\n", [b"of Windows"], []),
        (b"\r 50%\r    \rnext\n", [b"next"], []),  # a bar that removes itself
        (b"\r 50%\r    \r", [], []),
        (b"\r 50%\r\x1b[Knext\n", [b"next"], []),
        (b"\r 50%\x1b[2K\rnext\n", [b"next"], []),
        (b"\x1b[31mred\x1b[0m\n", [b"\x1b[31mred\x1b[0m"], []),
        (b"\x1b[2J\x1b[5;9Hthere\x1b[?25l\n", [b"there"], []),
        # As tqdm moves between bars below each other.
        (b"\router 0\n\rinner 0\x1b[A\n\rinner 1\x1b[A", [b"outer 0"], [b"inner 1"]),
        (
            b"\router 0\n\rinner 0\x1b[A\router 1\n\rinner 9\x1b[A",
            [b"outer 0"],
            [b"outer 1", b"inner 9"],
        ),
        (
            b"\router 0\n\rinner 9\x1b[A\router 1\n\r       \r\x1b[A\router 2\nend\n",
            [b"outer 0", b"outer 2", b"end"],
            [],
        ),
        (b"\router 0\n\rinner 1\x1b[1F\router 1\x1b[B\nend\n", [b"outer 0", b"outer 1", b"inner 1", b"end"], []),
    ],
)  # fmt: skip
def test_output_becomes_the_lines_that_a_terminal_would_show_in_the_end(
    output: bytes, lines: list[bytes], unfinished: list[bytes]
) -> None:
    for size in (len(output), 1):  # however it is torn
        cut = Lines()
        finished = []
        for start in range(0, len(output), size):
            finished += cut.feed(output[start : start + size])
        assert finished == lines
        assert cut.unfinished() == unfinished
        assert cut.finish() == unfinished
        assert cut.finish() == []


class _Screen:
    """A terminal, as text."""

    def __init__(self, columns: int = 20, rows: int = 8) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._screen.set_mode(pyte.modes.LNM)  # an end of line goes to the first column, too
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()

    def show(self, text: "str | bytes") -> list[str]:
        with self._lock:
            self._stream.feed(text.encode() if isinstance(text, str) else text)
        return self.lines()

    def lines(self) -> list[str]:
        with self._lock:
            return [line.rstrip() for line in self._screen.display if line.strip()]

    @property
    def column(self) -> int:
        return self._screen.cursor.x


def test_unfinished_lines_stay_below_all_others_and_are_cut() -> None:
    screen, live = _Screen(), LiveLines()
    live.put("a", ["\x1b[31ma at 10%"], 0.0)
    live.put("b", ["b of a terminal that is narrow"], 0.0)
    live.put("c", ["\u4e2d" * 30], 0.0)
    shown = screen.show(live.draw(20, 8, 0.0))
    assert shown == ["a at 10%", "b of a terminal tha", "\u4e2d" * 9]
    live.put("a", ["a at 20%"], 1.0)
    live.forget("c")
    shown = screen.show(f"{live.erase()}finished\n{live.draw(20, 8, 1.0)}")
    assert shown == ["finished", "a at 20%", "b of a terminal tha"]
    live.forget("b")
    assert screen.show(live.draw(20, 8, 1.0)) == ["finished", "a at 20%"]
    live.put("a", [], 1.0)
    assert screen.show(live.draw(20, 8, 1.0)) == ["finished"]
    assert screen.column == 0


def test_where_there_is_no_room_for_all_those_go_first_that_changed_lately() -> None:
    live = LiveLines()
    for number in range(10):
        live.put(number, [f"line {number}"], 0.0)
    for number in (9, 3):
        live.put(number, [f"line {number}"], 60.0)
    shown = _Screen(40).show(live.draw(40, 8, 60.0))
    assert shown == ["line 3", "line 9", "line 0", "... and 7 more lines"]


_BARS = """
    import sys
    import launchpad_lite as lp

    def work():
        print("begins")
        for percent in range(50):
            sys.stderr.write(f"\\r{percent}%")
        lp.wait_for_stop()

    program = lp.Program("bars")
    with program.group("bar"):
        for _ in range(2):
            program.add_node(lp.PyNode(work))
    lp.launch(program)
"""


def test_a_terminal_shows_colours_and_the_bar_of_each_node_until_the_program_is_ended(
    tmp_path: Path,
) -> None:
    screen, said = _Screen(60, 24), bytearray()
    bars = ["[bar[0]] 49%", "[bar[1]] 49%"]
    with Script(tmp_path, _BARS) as script:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        process = script.start(output=slave, env={"TERM": "xterm"})
        os.close(slave)

        def read() -> None:
            try:
                while data := os.read(master, 4096):
                    said.extend(data)
                    screen.show(data)
            except OSError:  # how Linux says that a terminal is closed
                pass

        reader = threading.Thread(target=read)
        reader.start()
        try:
            poll_until(lambda: sorted(screen.lines()[-2:]) == bars, 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()
            reader.join()
            os.close(master)
        assert b"\x1b[36m[bar[0]]\x1b[0m begins" in said
        shown = sorted(line for line in screen.lines() if line.startswith("[bar["))
        assert shown == sorted([*bars, "[bar[0]] begins", "[bar[1]] begins"])
        assert screen.column == 0
        assert script.log("bar[0]") == b"begins\n" + b"".join(b"\r%d%%" % i for i in range(50))
