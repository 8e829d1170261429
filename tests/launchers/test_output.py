"""The output of nodes: complete in files, readable on the console."""

import collections
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import launchpad_lite as lp
from courier import Secret
from launchers.host.grant import Grant
from launchers.host.link import LinkFrame, write_all
from launchers.host.worker import payloads
from launchers.supervision.agent_link import start_agent_here
from launchpad_lite.launching import AddressTable, LaunchOptions
from launchpad_lite.parts.as_json import to_json
from launchpad_lite.testing import poll_until
from tests.launchers.running import program_of
from tests.launchers.scripts import Script, without_logs_line

_MANY = """
    import sys
    import launchpad_lite as lp

    def talk(index):
        for line in range(2000):
            print(f"{index}:" + "abc" * (line % 40) + ":end")

    def odd(_):
        sys.stdout.buffer.write(b"\\xff\\xfe caf\\xc3\\xa9\\n")
        sys.stdout.write("no end of line")

    def bar(_):
        for percent in range(101):
            sys.stdout.write(f"\\r{percent}%")
        sys.stdout.write("\\n\\r7%\\r8%")

    def endless(_):
        for _ in range(100):
            sys.stdout.write("#" * 65535)

    program = lp.Program("output")
    if "closed" in sys.argv:
        sys.stdout.close()
    kind = sys.argv[1]
    with program.group(kind):
        for index in range(4 if kind == "talk" else 1):
            program.add_node(lp.PyNode(globals()[kind], index))
    lp.launch(program)
"""


def test_lines_of_nodes_are_whole_and_named_and_plain_in_a_pipe(tmp_path: Path) -> None:
    with Script(tmp_path, _MANY) as script:
        ended = script.run("talk")
        assert ended.code == 0
        lines = ended.stdout.splitlines()
        assert len(lines) == 8000
        for line in lines:
            assert re.fullmatch(r"\[talk\[(\d)\]\] \1:(abc)*:end", line)
        for index in range(4):
            log = script.log(f"talk[{index}]").decode().splitlines()
            prefix = f"[talk[{index}]] "
            assert log == [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


_RUDE = """
    import os
    import sys
    import launchpad_lite as lp

    SAID = (
        b"begin \\x1bc \\x1b]0;title\\x07 \\x1bM \\x1b7 \\x1b(0 \\x1bPq\\x1b\\\\ \\x08 \\xc2\\x9b2J \\x9b2J "
        b"\\x1b[2J\\x1b[31mred\\x1b[0m \\x1b]8;;http://a.b\\x1b\\\\link\\x1b]8;;\\x1b\\\\ end"
    )

    def rude():
        for byte in SAID + b"\\n":
            os.write(1, bytes([byte]))
        raise ValueError(SAID.decode(errors="surrogateescape"))

    def make_program():
        program = lp.Program("rude")
        program.add_node(lp.PyNode(rude), label="rude")
        return program

    if __name__ == "__main__" and sys.argv[1] == "main":
        sys.argv[1:] = []
        lp.main(make_program)
    elif __name__ == "__main__":
        lp.launch(make_program()).wait()
"""
_SHOWN = (
    r"begin \x1bc \x1b]0;title\x07 \x1bM \x1b7 \x1b(0 \x1bPq\x1b\ \x08 \x9b2J "
    "%s2J \x1b[31mred\x1b[0m link end\n"
)


@pytest.mark.parametrize("how", ["main", "uncaught"])
def test_no_words_of_nodes_reach_a_terminal_as_orders(tmp_path: Path, how: str) -> None:
    with Script(tmp_path, _RUDE) as script:
        ended = script.run(how)
        log = script.log("rude[0]")
    assert ended.code == 1
    assert "[rude[0]] " + _SHOWN % "\ufffd" in ended.stdout
    assert "ValueError: " + _SHOWN % r"\udc9b" in ended.stderr
    for text in (ended.stdout, ended.stderr):
        assert not re.search(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]*m)", text)
    assert log.startswith(b"begin \x1bc \x1b]0;title\x07 ")
    assert b" \x08 \xc2\x9b2J \x9b2J \x1b[2J" in log


def _count(lines: int) -> None:
    for number in range(lines):
        print(f"line {number:06}")


def test_a_log_keeps_its_beginning_and_its_end_within_its_limit(
    launch_program: Any, tmp_path: Path
) -> None:
    program = program_of(count=lp.PyNode(_count, 100_000))
    running = launch_program(program, "test_mp", log_dir=tmp_path / "run", log_limit_mib=0.3)
    running.wait()
    said = [line for node, line in running.running.output() if node == "count[0]"]
    assert (said[0], said[-1]) == (b"line 000000\n", b"line 099999\n")
    assert sum(line.startswith(b"[") for line in said) == 1
    files = [*(tmp_path / "run" / "count").iterdir()]
    assert sum(each.stat().st_size for each in files) < 0.31 * (1 << 20)


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_that_cannot_be_is_refused(limit: float) -> None:
    program = program_of(count=lp.PyNode(_count, 1))
    with pytest.raises(ValueError, match="log_limit_mib"):
        lp.launch(program, "test_mp", log_limit_mib=limit)


_STUCK = """
    import sys
    from pathlib import Path
    import launchpad_lite as lp

    def talk():
        for line in range(2000):
            print("abc" * 30, flush=True)
        Path("talked").touch()
        lp.wait_for_stop()

    def crash():
        while not Path("talked").exists():
            pass
        if lp.restart_count() == 0:
            raise ValueError("on its way")
        Path("back").touch()
        lp.wait_for_stop()

    program = lp.Program("stuck")
    program.add_node(lp.PyNode(talk), label="talk")
    program.add_node(lp.PyNode(crash), label="crash")
    running = lp.launch(program, notice_s=3, restart={"crash": "on_failure"})
    running.join()
    Path("killed").write_text(repr(running.result.killed))
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_reader_that_stands_still_holds_up_no_restart_and_no_end(
    tmp_path: Path, times: int
) -> None:
    with Script(tmp_path, _STUCK) as script, _full_pipe() as (source, sink):
        process = script.start(output=sink)
        poll_until((tmp_path / "back").exists, 20)
        signum = signal.SIGTERM if times == 1 else signal.SIGINT
        for _ in range(times):
            process.send_signal(signum)
        assert process.wait(15) == 128 + signum
        if times == 1:
            assert (tmp_path / "killed").read_text() == "()"
        assert script.log("talk[0]") == (b"abc" * 30 + b"\n") * 2000
        os.close(sink)
        with os.fdopen(os.dup(source), "rb") as said:
            assert b"Fatal" not in said.read()


@contextlib.contextmanager
def _full_pipe() -> Iterator[tuple[int, int]]:
    """Yields the ends of a pipe that takes nothing; the body closes the second."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(sink, bytes(4096))
    os.set_blocking(sink, True)
    yield source, sink
    os.close(source)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", "\ufffd\ufffd caf\u00e9"), ("ascii", "\\ufffd\\ufffd caf\\xe9")],
)
def test_output_may_be_any_bytes_and_need_not_end_its_line(
    tmp_path: Path, encoding: str, shown: str
) -> None:
    with Script(tmp_path, _MANY) as script:
        ended = script.run("odd", env={"PYTHONIOENCODING": encoding})
        assert ended.stdout == f"[odd[0]] {shown}\n[odd[0]] no end of line\n"
        assert script.log("odd[0]") == b"\xff\xfe caf\xc3\xa9\nno end of line"


def test_in_a_pipe_a_bar_is_its_last_state_and_a_line_without_end_comes_in_pieces(
    tmp_path: Path,
) -> None:
    with Script(tmp_path, _MANY) as script:
        assert script.run("bar").stdout == "[bar[0]] 100%\n[bar[0]] 8%\n"
        shown = script.run("endless").stdout
    assert shown.count("#") == 6_553_500
    assert len(shown.splitlines()) > 1


def test_a_console_that_is_gone_is_no_mistake(tmp_path: Path) -> None:
    with Script(tmp_path, _MANY) as script:
        ended = script.run("bar", "closed")
        assert (ended.code, without_logs_line(ended.stderr)) == (0, "")


def _flood() -> None:
    os.write(1, b"\n" * (1 << 20))


def _fail() -> None:
    raise ValueError("on its way")


def test_what_happens_to_a_node_is_said_before_output_that_waits_and_its_end_after_its_own() -> (
    None
):
    program = program_of("flood", flood=lp.PyNode(_flood), fail=lp.PyNode(_fail))
    table = AddressTable({}, Secret.generate())
    work = payloads(lp.plan(program, "test_mp"), table, LaunchOptions())
    link = start_agent_here()
    stdin, stdout = link.process.stdin, link.process.stdout
    assert stdin is not None
    assert stdout is not None

    def workers() -> int:
        return len(psutil.Process(os.getpid()).children(recursive=True)) - 2

    def run(node: str) -> None:
        body, fields = work[node].encode(), {"node": node, "attempt": 0, "log": None}
        options = {"has_flags": False, "grant": to_json(Grant())}
        write_all(stdin.fileno(), LinkFrame("start", {**fields, **options}, body).encode())
        poll_until(workers, 20)
        poll_until(lambda: not workers(), 20)

    with stdin, stdout:
        link.frames.begin(time.monotonic() + 20)
        run("flood[0]")
        run("fail[0]")
        # Nothing was read so far. The pipe is full, and one more piece is on its way.
        said, failed, ended = collections.Counter[str](), [], []
        while len(ended) < 2:
            frame = link.frames.read(time.monotonic() + 20)
            assert frame is not None
            if frame.op == "output":
                said[frame["node"]] += len(frame.body)
            elif frame.op == "Failed":
                assert said["flood[0]"] <= 3 * (64 << 10)
                failed.append(frame["node"])
            elif frame.op == "exited":
                ended.append((frame["node"], said["flood[0]"]))
        assert failed == ["fail[0]"]
        assert ended == [("fail[0]", ended[0][1]), ("flood[0]", 1 << 20)]
        assert said["fail[0]"]
    assert link.process.wait(20) == 0
