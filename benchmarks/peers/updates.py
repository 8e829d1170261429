"""What the peers of `benchmarks.values` have in common: workers that update one value on a server."""

import json
import sys
import time
from typing import Any

import harness


class Engine:
    """Workers without a barrier: each gets the value, computes an update as large, and sends it."""

    def start(self, workers: int, size: int) -> None:
        """Starts the server and the workers.

        Args:
            workers: How many.
            size: Of the value, in bytes.
        """
        raise NotImplementedError

    def updates(self) -> int:
        """Returns how many updates were applied so far."""
        raise NotImplementedError

    def work(self, seconds: float) -> None:
        """Lets the workers work for so long; here they do it by themselves."""
        time.sleep(seconds)

    def stop(self) -> None:
        """Stops them."""


def value(size: int) -> Any:
    """Returns zeros of so many bytes."""
    import numpy as np

    return np.zeros(size // 4, np.float32)


def touch(array: Any) -> None:
    """Reads a number of every page, so that no peer is fast because it does not deliver."""
    float(array[::1024].sum())


def main(engine: Engine) -> None:
    """Does what is asked, a line of JSON at a time, until nothing more is asked."""
    answers = harness.open_answers()

    def measure(seconds: float) -> float:
        """Returns updates per second."""
        before, start = engine.updates(), time.perf_counter()
        engine.work(seconds)
        return (engine.updates() - before) / (time.perf_counter() - start)

    calls = {"start": engine.start, "warm": engine.work, "measure": measure}
    sys.stdin.readline()  # the set-up of other peers
    for line in sys.stdin:
        request = json.loads(line)
        call = calls[request.pop("do")]
        harness.answer(answers, lambda call=call, request=request: call(**request))
    engine.stop()
