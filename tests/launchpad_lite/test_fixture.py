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
