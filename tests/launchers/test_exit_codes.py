"""How programs end that only launch, and what they say."""

import sys
from pathlib import Path

import pytest

from tests.launchers.scripts import Script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_SCRIPT = """
    import os, sys
    import launchpad_lite as lp

    def returns():
        pass

    def stops():
        lp.stop()
        lp.wait_for_stop()

    def raises():
        raise ValueError("the cause")

    class BadConstructor:
        def __init__(self):
            raise ValueError("the cause")

    def bad_constructor_node():
        return lp.CourierNode(BadConstructor)

    def unimportable_node():
        import only_here  # beside the script, but gone when the worker wants it
        os.remove(only_here.__file__)
        return lp.PyNode(only_here.work)

    program = lp.Program("ends")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="other")
    with program.group("node"):
        program.add_node(lp.PyNode(returns))
        kind = sys.argv[1]
        make = globals().get(kind + "_node") or (lambda: lp.PyNode(globals()[kind]))
        program.add_node(make())
    lp.launch(program, notice_s=30)  # who is ended by force is named, too
"""


def test_a_good_end_is_0(tmp_path: Path) -> None:
    with Script(tmp_path, _SCRIPT) as script:
        ended = script.run("stops")
        assert ended.code == 0, ended.stderr
        (folder,) = script.logs.iterdir()
        assert ended.stderr == f"ends: stopped; logs in {folder}\n"
        assert script.processes() == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raises", ["ValueError: the cause", "Traceback", "in raises"]),
        ("bad_constructor", ["ValueError: the cause", "Traceback", "__init__"]),
        ("unimportable", ["ModuleNotFoundError", "only_here"]),
    ],
)
def test_a_failure_is_1_and_says_who_and_why(tmp_path: Path, kind: str, words: list[str]) -> None:
    (tmp_path / "only_here.py").write_text("def work(): pass\n")
    with Script(tmp_path, _SCRIPT) as script:
        ended = script.run(kind, env={"PYTHONDONTWRITEBYTECODE": "1"})
        assert ended.code == 1
        assert ended.stderr.lstrip().startswith("node[1] on localhost failed")
        for word in words:
            assert word in ended.stderr
        assert "other[0]" not in ended.stderr
        assert script.processes() == []
        if kind == "raises":
            assert "ValueError: the cause" in script.log("node[1]").decode()


@pytest.mark.slow
def test_a_node_that_crashes_while_it_writes_down_its_stacks_is_not_blamed(tmp_path: Path) -> None:
    source = """
        import ctypes, faulthandler, pathlib, time
        import launchpad_lite as lp
        from launchers.host.stacks import STACKS_SIGNAL
        from tests.launchers.timing import Timing

        def other():
            # As faulthandler does, seldom, when other threads go on while it looks at them.
            faulthandler.unregister(STACKS_SIGNAL)
            nowhere = ctypes.c_void_p(64)
            ctypes.CDLL(None).signal(STACKS_SIGNAL, nowhere)
            pathlib.Path("up").touch()
            sum(range(10**15))  # answers nothing meanwhile, so it gets the signal

        def node():
            while not pathlib.Path("up").exists():
                time.sleep(0.01)
            raise ValueError("the cause")

        timing = Timing(terminate_s=30.0)  # a slow machine takes its time to crash
        program = lp.Program("ends")
        program.add_node(lp.PyNode(other), label="other")
        program.add_node(lp.PyNode(node), label="node")
        lp.launch(program, "test_mp", notice_s=1, timing=timing).wait()
    """
    with Script(tmp_path, source) as script:
        ended = script.run(env={"PYTHONPATH": str(Path(__file__).parents[2])})
        assert ended.code == 1
        assert "ValueError: the cause" in ended.stderr
        assert "Segmentation fault" in script.log("other[0]").decode()
        assert "SIGSEGV" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        ("raise KeyError(1)", 1),
        ("sys.exit(3)", 3),
        ("sys.settrace(lambda *_: None); begun.is_set()", 0),
    ],
)
def test_a_thread_that_cannot_be_ended_does_not_hold_up_the_exit(
    tmp_path: Path, last: str, code: int
) -> None:
    source = f"""
        import atexit, sys, threading
        import launchpad_lite as lp

        class Flushes:
            def __del__(self):
                threading.Event().wait()

        kept = Flushes()  # what the interpreter clears up in the end
        begun, stuck = threading.Event(), threading.Lock()
        stuck.acquire()

        def get_stuck():
            begun.set()
            stuck.acquire()

        program = lp.Program("stuck")
        program.add_node(lp.PyNode(get_stuck), label="stuck")
        running = lp.launch(program, "local_mt", notice_s=0.1)
        begun.wait()
        atexit.register(print, "last words")
        running.stop()
        {last}
    """
    with Script(tmp_path, source) as script:
        ended = script.run(timeout_s=30)
    assert (ended.code, ended.stdout) == (code, "last words\n"), ended.stderr
    assert ("KeyError" in ended.stderr) == ("KeyError" in last)


@pytest.mark.parametrize(
    ("last", "code", "words"),
    [
        ("", 0, ""),
        ("sys.exit('bye')", 1, "bye\n"),
        ("raise KeyError(1)", 1, "waiting for 'executors'. Ctrl-C stops it\n"),
    ],
)
def test_threads_may_use_executors_after_the_end_of_the_script(
    tmp_path: Path, last: str, code: int, words: str
) -> None:
    source = f"""
        import sys, threading, traceback
        import launchpad_lite as lp
        from launchpad_lite.testing import poll_until

        def script_is_over():
            # For an instant, between the script and what follows it, the main thread has no frame.
            frame = sys._current_frames().get(threading.main_thread().ident)
            stack = frame and traceback.extract_stack(frame)
            return any(each.name == "_wait_at_exit" for each in stack or ())

        def work():
            poll_until(script_is_over)
            from concurrent.futures import ThreadPoolExecutor
            with ThreadPoolExecutor(1) as executor:
                print(executor.submit(len, "abc").result(), file=sys.stderr)

        program = lp.Program("executors")
        program.add_node(lp.PyNode(work), label="works")
        lp.launch(program, "local_mt")
        {last}
    """
    with Script(tmp_path, source) as script:
        ended = script.run(timeout_s=30)
    assert ended.code == code
    assert ended.stderr.endswith(f"{words}3\n")
