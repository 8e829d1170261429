"""`why` names the true cause of each program that hangs in its own way."""

import math

import pytest

from tests.launchpad_lite.hanging import named_after, scenarios

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("launcher", "name"),
    [(launcher, name) for launcher in ("test_mt", "test_mp") for name in scenarios(launcher)],
)
def test_the_cause_of_a_hang_is_named(launcher: str, name: str) -> None:
    started_s, named_s, text = named_after(name, launcher)
    assert named_s < math.inf, f"started after {started_s:.2f} s\n{text}"
