"""Waiting for a condition, where there is no event to wait for."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Returns when `condition()` is true; fails the test if it does not become so."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.005)
