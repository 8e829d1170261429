"""Scripts and suites of the original Launchpad, run as their users run them."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launchpad_lite.testing import poll_until
from tests.launchers.scripts import Ended, Script

_ROOT = Path(__file__).resolve().parents[2]
_INSTALLED = {"PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'compat'}"}

_FLAGGED = """
    import functools

    from absl import app, flags
    import launchpad as lp

    FLAGS = flags.FLAGS
    flags.DEFINE_integer("number", 3, "How many.")

    @functools.lru_cache(maxsize=None)
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    class Server:
        def compute(self, n):
            return fibonacci(n)

    class Client:
        def __init__(self, servers, function):
            self._servers = servers
            self._function = function

        def run(self):
            futures = [each.futures.compute(self._function(10)) for each in self._servers]
            found = [future.result() for future in futures]
            print(found, lp.context.get_context().launch_type.value, flush=True)
            lp.stop()

    def main(_):
        program = lp.Program("flagged")
        with program.group("server"):
            servers = [program.add_node(lp.CourierNode(Server)) for _ in range(FLAGS.number)]
        program.add_node(lp.CourierNode(Client, servers, fibonacci), label="client")
        lp.launch(program, xm_resources=None)

    if __name__ == "__main__":
        app.run(main)
"""


def run_pytest(folder: Path, source: str) -> Ended:
    """Runs tests as those do who have installed the package."""
    command = (sys.executable, "-m", "pytest", "-q")
    with Script(folder, source, "test_it.py") as script:
        return script.run(str(script.path), command=command, env=_INSTALLED)


def test_a_script_runs_without_a_change_and_without_an_installation(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "launchpad_lite.launch")
    with Script(tmp_path, _FLAGGED) as script:
        for options, kind in ((), "local_mt"), (("--lp_launch_type=local_mp",), "local_mp"):
            ended = script.run(
                "--compat", str(script.path), *options, "--number=2", command=command
            )
            assert ended.code == 0, ended.stderr
            assert f"[139583862445, 139583862445] {kind}\n" in ended.stdout
        package = tmp_path / "package"
        package.mkdir()
        script.path.rename(package / "module.py")
        options = ("--launcher", "local_mp", "--compat", "-m", "package.module", "--number=1")
        ended = script.run(*options, command=command)
        assert ended.code == 0, ended.stderr
        assert "[139583862445] " in ended.stdout
        ended = script.run("--compat", "nothing.py", command=command)
        assert ended.code == 2
        assert "--compat is followed by a script" in ended.stderr


def test_a_program_of_a_test_type_ends_with_its_script(tmp_path: Path) -> None:
    source = """
        import launchpad as lp

        program = lp.Program("unstopped")
        program.add_node(lp.PyNode(lp.wait_for_stop), label="stays")
        lp.launch(program, "test_mt")
        print("launched")
    """
    with Script(tmp_path, source) as script:
        ended = script.run(env=_INSTALLED, timeout_s=30)
    assert (ended.code, ended.stdout) == (0, "launched\n")


def test_a_program_of_a_test_type_ends_with_the_test_of_pytest(tmp_path: Path) -> None:
    source = """
        import launchpad as lp

        launched = []

        def fail():
            raise LookupError("nothing here")

        def launch(function):
            program = lp.Program("unstopped")
            program.add_node(lp.PyNode(function), label="node")
            launched.append(lp.launch(program, launch_type="test_mt"))

        def test_one():
            launch(lp.wait_for_stop)

        def test_two():
            assert launched[0].running.result is not None
            launch(fail)
            launched[1].running.join()
    """
    ended = run_pytest(tmp_path, source)
    assert "2 passed, 1 error" in ended.stdout, ended.stdout
    assert "LookupError: nothing here" in ended.stdout


def test_a_program_of_a_fixture_ends_with_the_fixture(tmp_path: Path) -> None:
    source = """
        import unittest
        import pytest
        import launchpad as lp

        launched = []

        class Counter:
            def __init__(self):
                self._count = 0

            def count(self):
                self._count += 1
                return self._count

        def launch():
            program = lp.Program("counter")
            handle = program.add_node(lp.CourierNode(Counter), label="counter")
            launched.append(lp.launch(program, launch_type="test_mt"))
            return handle.dereference()

        class TestOne(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                cls.counter = launch()

            def test_one(self):
                assert self.counter.count() == 1

            def test_two(self):
                assert self.counter.count() == 2

        @pytest.fixture(scope="module")
        def counter():
            assert launched[0].running.result is not None
            yield launch()
            assert launched[1].running.result is None

        def test_one(counter):
            assert counter.count() == 1

        def test_two(counter):
            assert counter.count() == 2
    """
    ended = run_pytest(tmp_path, source)
    assert "4 passed" in ended.stdout, ended.stdout
    assert ended.code == 0, ended.stderr


@pytest.mark.slow
def test_tests_fail_although_a_thread_of_a_node_is_stuck(tmp_path: Path) -> None:
    source = """
        import threading
        from absl import flags
        import launchpad as lp

        flags.FLAGS["lp_termination_notice_secs"].value = 0.1
        begun, stuck = threading.Event(), threading.Lock()
        stuck.acquire()

        def get_stuck():
            begun.set()
            stuck.acquire()

        def test_one():
            program = lp.Program("stuck")
            program.add_node(lp.PyNode(get_stuck), label="stuck")
            lp.launch(program, launch_type="test_mt", serialize_py_nodes=False)
            begun.wait()

        def test_two():
            raise LookupError("nothing here")
    """
    ended = run_pytest(tmp_path, source)
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout
    assert ended.code == 1


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("tmux") is None and os.environ.get("CI") != "true", reason="there is no tmux here"
)
def test_each_node_has_a_window_of_tmux_while_the_program_runs(tmp_path: Path) -> None:
    source = """
        import launchpad as lp

        def speak(number):
            print("word", number, flush=True)
            lp.wait_for_stop()

        program = lp.Program("windows")
        with program.group("speaks"):
            for number in range(2):
                program.add_node(lp.PyNode(speak, number))
        lp.launch(program, "local_mp", terminal="tmux_session")
    """
    # The path of a socket has to be short.
    short = tempfile.TemporaryDirectory(dir="/tmp")
    environment = {**_INSTALLED, "TMUX_TMPDIR": short.name}

    def tmux(*arguments: str) -> str:
        command = ["tmux", *arguments]
        return subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True
        ).stdout

    with short, Script(tmp_path, source) as script:
        script.start(env=environment)
        for number in range(2):
            window = f"=launchpad:speaks/{number}"
            poll_until(lambda: f"word {number}" in tmux("capture-pane", "-p", "-t", window))  # noqa: B023
        assert script.process is not None
        script.process.send_signal(signal.SIGINT)
        stdout, _ = script.process.communicate(timeout=30)
        assert "word" not in stdout
        poll_until(lambda: not tmux("list-sessions"))


def test_it_does_not_mix_with_the_original(tmp_path: Path) -> None:
    say_installed(tmp_path, "dm-launchpad")
    original = tmp_path / "launchpad"
    original.mkdir()
    (original / "__init__.py").touch()
    command = (sys.executable, "-m", "launchpad_lite.launch", "--compat")
    folder = tmp_path / "scripts"
    folder.mkdir()
    with Script(folder, "import launchpad") as script:
        for start, paths in (
            ((sys.executable,), [_ROOT, _ROOT / "compat", tmp_path]),
            (command, [_ROOT, tmp_path]),
        ):
            environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
            ended = script.run(str(script.path), command=start, env=environment)
            assert ended.code == 1
            assert_names_the_mixture(ended.stderr)


def say_installed(folder: Path, name: str) -> None:
    known = folder / f"{name.replace('-', '_')}-0.5.2.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.5.2\n")


def assert_names_the_mixture(stderr: str) -> None:
    error = stderr.splitlines()[-1]
    assert error.startswith(
        f"ImportError: launchpad-lite at {_ROOT / 'launchpad'} and dm-launchpad 0.5.2 at"
    ), stderr
    assert "run: pip uninstall --yes dm-launchpad; pip install --force-reinstall --no-deps" in error


def test_the_original_says_that_its_files_are_mixed_with_ours() -> None:
    words = "dm-launchpad and launchpad-lite.*pip uninstall --yes dm-launchpad; pip install --force"
    with pytest.raises(ImportError, match=words):
        importlib.import_module("courier.handlers.python")


def test_the_errors_of_the_original_are_those_of_its_package_where_it_is_installed(
    tmp_path: Path,
) -> None:
    (tmp_path / "pybind11_abseil").mkdir()
    (tmp_path / "pybind11_abseil" / "__init__.py").touch()
    (tmp_path / "pybind11_abseil" / "status.py").write_text("StatusNotOk = LookupError")
    source = """
        import launchpad
        from pybind11_abseil.status import StatusNotOk

        assert StatusNotOk is LookupError
    """
    with Script(tmp_path, source) as script:
        ended = script.run(env=_INSTALLED)
        assert ended.code == 0, ended.stderr
