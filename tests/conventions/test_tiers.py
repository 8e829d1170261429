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

tests.conftest.LATE_S = 0.4
"""
_MARKERS = "\n".join(f"  {name}: ..." for name in ("fast", "bed", "slow", "long"))


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(_CONFTEST)
    pytester.makeini(f"[pytest]\nmarkers =\n{_MARKERS}")
    return pytester


def test_a_fast_test_that_takes_long_is_listed_and_fails_no_run(suite: pytest.Pytester) -> None:
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
    assert run.ret == pytest.ExitCode.OK
    run.assert_outcomes(passed=2)
    run.stdout.fnmatch_lines("*.? s *::test_late")
    run.stdout.no_fnmatch_line("* s *::test_slow")


def test_four_quarters_are_all_tests(suite: pytest.Pytester) -> None:
    suite.makepyfile("import pytest\n@pytest.mark.parametrize('n', range(40))\ndef test(n): ...")
    parts = [suite.runpytest_subprocess(f"--quarter={n}") for n in range(4)]
    passed = [part.parseoutcomes()["passed"] for part in parts]
    assert sum(passed) == 40
    assert all(0 < count < 40 for count in passed)
