"""The fixture `launch_program` tells of what a test did not ask about."""

import pytest

pytest_plugins = ["pytester"]

_TESTS = """
import pytest
import launchpad_lite as lp


def fail():
    raise ValueError("no data")


def make_program():
    program = lp.Program("fails")
    program.add_node(lp.PyNode(fail), label="node")
    return program


def test_that_asks(launch_program):
    with pytest.raises(lp.NodeFailedError):
        launch_program(make_program()).wait()


def test_that_does_not_ask(launch_program):
    launch_program(make_program()).running.join(30)
"""


def test_a_failure_that_a_test_did_not_ask_about_fails_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(_TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*the test did not ask how its program ended: node[[]0[]] * failed: ValueError: no data*"]
    )


_HANGS = """
import threading

import pytest
import launchpad_lite as lp
from launchpad_lite.testing import programs

programs._SETTLE_S = 3600.0  # nobody waits for the end of a thread that was given up


class Server:
    def __init__(self):
        self._lock = threading.Lock()

    def wait_for_nobody(self):
        with self._lock, self._lock:
            pass


@pytest.mark.timeout(2)
def test_that_hangs(launch_program):
    program = lp.Program("hangs")
    program.add_node(lp.CourierNode(Server), label="server")
    launch_program(program, "{}").client("server").wait_for_nobody()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_a_call_that_hangs_shows_where_its_node_is_and_costs_little_more(
    pytester: pytest.Pytester, launcher: str
) -> None:
    pytester.makepyfile(_HANGS.replace("{}", launcher))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*where the nodes are*", "server[[]0[]]:", "*in wait_for_nobody", "*with self._lock, *"]
    )


def test_a_test_run_that_does_not_use_the_fixture_does_not_load_us(
    pytester: pytest.Pytester,
) -> None:
    for name in ("courier", "launchers"):  # folders of that project
        pytester.mkpydir(name)
    pytester.makepyfile(
        "import sys\n"
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('launchpad_lite')\n"
        "    assert not {'launchpad_lite', 'launchpad', 'courier'} & {*sys.modules}\n"
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
