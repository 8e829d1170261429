"""What tests/conftest.py promises of tiers, held against a small suite of its own."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

_ROOT = Path(__file__).resolve().parents[2]
_CONFTEST = f"""
import sys

sys.path.insert(0, {str(_ROOT)!r})
import tests.conftest
from tests.conftest import *

tests.conftest.FAST_S = 0.2
tests.conftest.BUSY = {{busy}}
"""
_MARKERS = "\n".join(f"  {name}: ..." for name in ("fast", "bed", "slow", "long"))


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("LAUNCHPAD_TESTS_ALONE", raising=False)
    pytester.makeconftest(_CONFTEST.format(busy=2.0))  # whatever runs beside this test
    pytester.makeini(f"[pytest]\nmarkers =\n{_MARKERS}")
    return pytester


def test_a_fast_test_that_takes_too_long_fails_the_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import time, pytest

        def test_late():
            time.sleep(0.5)

        @pytest.mark.slow
        def test_slow():
            time.sleep(0.5)
        """
    )
    run = suite.runpytest_subprocess("-n2")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.assert_outcomes(passed=2)
    run.stdout.fnmatch_lines("*0.5 s *::test_late")
    run.stdout.no_fnmatch_line("* s *::test_slow")


def test_a_fast_test_that_is_in_time_alone_once_passes(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pathlib, time

        def test_held_up_twice():
            runs = pathlib.Path("runs")
            runs.open("a").write(".")
            if runs.stat().st_size < 3:
                time.sleep(0.5)
        """
    )
    assert suite.runpytest_subprocess().ret == pytest.ExitCode.OK


def test_what_fails_alone_is_not_run_until_it_passes(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pathlib, time

        def test_fails_the_second_time():
            runs = pathlib.Path("runs")
            runs.open("a").write(".")
            assert runs.stat().st_size != 2
            time.sleep(0.5)
        """
    )
    assert suite.runpytest_subprocess().ret == pytest.ExitCode.TESTS_FAILED


def test_nothing_is_known_of_late_tests_on_a_machine_that_others_use(
    suite: pytest.Pytester,
) -> None:
    suite.makeconftest(_CONFTEST.format(busy=-1.0))
    suite.makepyfile("import time\ndef test_late():\n    time.sleep(0.5)")
    run = suite.runpytest_subprocess()
    assert run.ret == pytest.ExitCode.OK
    run.stdout.fnmatch_lines("1 were late, but other programs used *")


def test_of_many_late_tests_the_slowest_are_measured_again(suite: pytest.Pytester) -> None:
    suite.makeconftest(f"{_CONFTEST.format(busy=2.0)}\ntests.conftest.MOST_AGAIN = 1")
    suite.makepyfile(
        """
        import time, pytest

        @pytest.mark.parametrize("s", [0.5, 0.55, 0.45])
        def test_late(s):
            time.sleep(s)
        """
    )
    run = suite.runpytest_subprocess()
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["3 were late; the slowest 1 were measured again.", "*[[]0.55[]]*"])
    run.stdout.no_fnmatch_line("*[[]0.45[]]*")


def test_a_test_has_one_tier(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.bed

        @pytest.mark.slow
        def test_both(): ...
        """
    )
    run = suite.runpytest_subprocess()
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines("*::test_both has more than one tier: *bed*slow*")


def test_no_fast_test_is_serial(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.serial\ndef test_alone(): ...")
    run = suite.runpytest_subprocess()
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines("*::test_alone is serial: give it another tier than fast")


def test_four_quarters_are_all_tests(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.parametrize('n', range(40))\ndef test(n): ...")
    parts = [suite.runpytest_subprocess(f"--quarter={n}") for n in range(4)]
    passed = [part.parseoutcomes()["passed"] for part in parts]
    assert sum(passed) == 40
    assert all(0 < count < 40 for count in passed)


def test_each_reason_of_skips_is_one_line(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.skipif(True, reason="needs an engine")
        @pytest.mark.parametrize("n", range(3))
        def test_skipped(n): ...
        """
    )
    run = suite.runpytest_subprocess()
    assert run.stdout.str().count("needs an engine") == 1
    run.stdout.fnmatch_lines("*3 *needs an engine*")
