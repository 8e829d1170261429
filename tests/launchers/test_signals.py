"""What signals to the launcher and to the agent do."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import launchpad_lite as lp
from launchpad_lite.process.signal_waker import SIGNAL_WAKER
from launchpad_lite.testing import poll_until
from tests.launchers.scripts import Script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_WAITING = """
    import pathlib, sys, time
    import launchpad_lite as lp

    def wait(index):
        lp.register_stop_handler(lambda: pathlib.Path(f"handled{index}").touch())
        pathlib.Path(f"up{index}").touch()
        lp.wait_for_stop()
        pathlib.Path(f"interrupted{index}").write_text(str(lp.current_node().is_interrupted))

    program = lp.Program("waiting")
    with program.group("node"):
        for index in range(2):
            program.add_node(lp.PyNode(wait, index))
    running = lp.launch(program, launcher="test_mp", notice_s=600)
    pathlib.Path("launched").touch()
    if "waits" in sys.argv:
        running.wait()
"""


_LAUNCHING = """
    import pathlib, signal, sys, time
    import launchpad_lite as lp
    from launchpad_lite.launching import Launcher

    def wait():
        pathlib.Path("up").touch()
        lp.wait_for_stop()

    program = lp.Program("before")
    node = lp.PyNode(wait) if "runs" in sys.argv else lp.PyNode(print, "hello")
    program.add_node(node, label="node")
    if "first" not in sys.argv:
        running = lp.launch(program, launcher="test_mp", notice_s=60)
        if "runs" not in sys.argv:
            running.wait()

    class Waiting(Launcher):
        description = "waits"

        def start(self, plan, options):
            try:
                pathlib.Path("launching").touch()
                time.sleep(60)
            finally:
                pathlib.Path("cancelled").touch()

    waiting = lp.Program("waiting")
    waiting.add_node(lp.PyNode(print, "never"), label="node")
    lp.launch(waiting, Waiting())
"""


def _wait_until_up(script: Script) -> None:
    script.wait_for("up", 2)
    script.wait_for("launched")  # nodes may be up before signals are looked at


@pytest.mark.parametrize(
    ("before", "signum"),
    [
        ("first", signal.SIGTERM),
        pytest.param("ended", signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("runs", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_launch_that_waits_is_cancelled_whatever_was_launched_before(
    tmp_path: Path, before: str, signum: signal.Signals
) -> None:
    with Script(tmp_path, _LAUNCHING) as script:
        process = script.start(before)
        script.wait_for("launching")
        if before == "runs":
            script.wait_for("up")
        process.send_signal(signum)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signum
        assert (tmp_path / "cancelled").exists()
        script.assert_gone()


@pytest.mark.parametrize(
    ("how", "signum"), [("waits", signal.SIGINT), ("ends", signal.SIGTERM), ("ends", signal.SIGHUP)]
)
def test_a_signal_stops_in_order(tmp_path: Path, how: str, signum: signal.Signals) -> None:
    with Script(tmp_path, _WAITING) as script:
        process = script.start(how)
        _wait_until_up(script)
        process.send_signal(signum)
        _, told = process.communicate(timeout=60)
        # An interpreter that is left by KeyboardInterrupt ends by the signal; shells say 130.
        assert process.returncode in (128 + signum, -signum)
        assert f"launchpad: stopping 'waiting' ({signum.name})" in told
        assert "Traceback" not in told
        assert len(list(tmp_path.glob("handled*"))) == 2
        assert [path.read_text() for path in tmp_path.glob("interrupted*")] == ["True"] * 2
        script.assert_gone()


_PATH = "script:make_program"
_SLOW_TO_STOP = """
    import pathlib
    import launchpad_lite as lp

    def wait():
        pathlib.Path("up").touch()
        lp.wait_for_stop()
        while True:
            pathlib.Path("stays").touch()

    def make_program():
        program = lp.Program("slow")
        program.add_node(lp.PyNode(wait), label="node")
        return program
"""


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_says_who_is_waited_for_and_ends_without_a_traceback(
    tmp_path: Path,
) -> None:
    with Script(tmp_path, _SLOW_TO_STOP) as script:
        launch = (sys.executable, "-m", "launchpad_lite.launch", "--launcher=local_mp", _PATH)
        process = script.start("--lp_termination_notice_secs=600", command=launch)
        script.wait_for("up")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        told = [process.stderr.readline() for _ in range(2)]
        assert told[0].endswith("(SIGINT); a second Ctrl-C ends it at once\n"), told
        assert "waiting for node[0]" in told[1], told
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        assert "Traceback" not in rest
        script.assert_gone()


@pytest.mark.slow
def test_sigterm_to_an_agent_that_passes_on_much_output_stops_in_order(tmp_path: Path) -> None:
    source = """
        import pathlib
        import launchpad_lite as lp

        def shout():
            stop = lp.stop_event()
            while not stop.is_set():
                print("x" * 5000)
                pathlib.Path("up").touch()

        program = lp.Program("shout")
        program.add_node(lp.PyNode(shout), label="shout")
        lp.launch(program, notice_s=20).wait()
    """
    with Script(tmp_path, source) as script:
        process = script.start(output=subprocess.DEVNULL)
        script.wait_for("up")
        agent = script.agent()
        assert agent is not None
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended before the last
            for _ in range(50):
                agent.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        script.assert_gone()


def test_the_end_of_the_terminal_is_nothing_to_who_ignores_it(tmp_path: Path) -> None:
    with Script(tmp_path, _WAITING) as script:
        process = script.start("waits", command=("nohup", sys.executable, str(script.path)))
        _wait_until_up(script)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143
        script.assert_gone()


def test_an_interrupt_while_the_supervisor_is_started_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def start_interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "launchpad-interrupted":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    program = lp.Program("interrupted")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="node")
    with pytest.raises(KeyboardInterrupt):
        lp.launch(program, "test_mp", notice_s=60)
    poll_until(lambda: "launchpad-interrupted" not in {t.name for t in threading.enumerate()}, 60)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(4))
def test_an_interrupt_during_the_start_ends_all(tmp_path: Path, moment: int) -> None:
    source = _WAITING.replace(
        "    running =", "    pathlib.Path('launching').touch()\n    running ="
    )
    with Script(tmp_path, source) as script:
        process = script.start("waits")
        script.wait_for("launching")
        started = time.monotonic()
        poll_until(lambda: time.monotonic() > started + 0.15 * moment)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            # Python drops an interrupt that comes in a callback of its own, as at the end of an
            # import, and says so.
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=40)
            assert "Exception ignored" in stderr
        assert process.returncode in (130, -signal.SIGINT)
        script.assert_gone()


_TAKEN_BY_ANOTHER = """
    import os, pathlib, queue, signal, socket, sys, threading, time
    import launchpad_lite as lp

    def take(signum, main):
        # As the kernel may choose, while the main thread waits without a limit.
        frames = [None]
        while not is_up() or not waits(frames[-1]) or frames[-1] is not frames[-2]:
            time.sleep(0.02)
            frames.append(sys._current_frames()[main])
        signal.pthread_kill(threading.get_ident(), signum)

    def waits(frame):
        return frame and frame.f_code.co_name == "wait" and frame.f_locals["timeout"] is None

    def wait():
        pathlib.Path("up").touch()
        if "node" in sys.argv:
            start_to_take(signal.SIGTERM)
        lp.wait_for_stop()

    def is_up():
        return pathlib.Path("up").exists()

    def start_to_take(signum):
        arguments = signum, threading.main_thread().ident
        threading.Thread(target=take, args=arguments, daemon=True).start()

    if __name__ == "__main__":
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        program = lp.Program("waiting")
        program.add_node(lp.PyNode(wait), label="node")
        running = lp.launch(program, launcher="test_mp", notice_s=60)
        if "node" not in sys.argv:
            start_to_take(getattr(signal, sys.argv[2]))
        if sys.argv[1] == "waits":
            running.wait()
        elif sys.argv[1] == "own":
            gate = threading.Event()
            threading.Thread(target=lambda: (running.join(), gate.set())).start()
            gate.wait()
            assert ours.recv(1) == bytes([signal.SIGTERM])
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("waits", "SIGINT"), -signal.SIGINT),
        (("own", "SIGTERM"), 128 + signal.SIGTERM),
        pytest.param(("ends", "SIGHUP"), 128 + signal.SIGHUP, marks=pytest.mark.slow),
        (("waits", "node"), 128 + signal.SIGTERM),
    ],
)
def test_a_signal_that_another_thread_takes_wakes_the_main_thread(
    tmp_path: Path, arguments: tuple[str, str], code: int
) -> None:
    with Script(tmp_path, _TAKEN_BY_ANOTHER) as script:
        process = script.start(*arguments)
        _, told = process.communicate(timeout=10)
        assert (process.returncode, "Traceback" in told) == (code, False), told
        script.assert_gone()


def test_signals_reach_the_wakeup_descriptor_of_a_script_at_once_and_nothing_in_its_place() -> None:
    """An event loop closes its own, and restores ours, which it has found."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    SIGNAL_WAKER.install()
    found = signal.set_wakeup_fd(theirs.fileno())
    try:
        SIGNAL_WAKER.install()
        began_at = time.monotonic()
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
            assert ours.recv(1) == bytes([signal.SIGUSR1])
        assert time.monotonic() - began_at < 0.4
        source, sink = os.pipe()
        os.dup2(sink, theirs.fileno())
        os.set_blocking(source, False)
        signal.raise_signal(signal.SIGUSR1)
        assert ours.recv(1)  # what it had been
        with pytest.raises(BlockingIOError):
            os.read(source, 1)
        os.close(source)
        os.close(sink)
    finally:
        signal.set_wakeup_fd(found)
        signal.signal(signal.SIGUSR1, handler)
        ours.close()
        theirs.close()
