"""What the peers of `benchmarks.datasets` have in common: they run one job after another when asked."""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import harness


class Engine:
    """Counts words and sorts lines with some workers. Each peer is one."""

    def start(self, workers: int, scratch: str) -> None:
        """Starts the workers, and has each of them do something.

        Args:
            workers: How many.
            scratch: A folder for what does not fit into memory.
        """
        raise NotImplementedError

    def word_count(self, files: str) -> dict[str, int]:
        """Returns how often each word is in files.

        Args:
            files: A pattern of their names.
        """
        raise NotImplementedError

    def sort(self, files: str, folder: str) -> None:
        """Writes all lines in the order of their first 8 characters.

        Args:
            files: A pattern of names.
            folder: Where to; the files in it are in order by name.
        """
        raise NotImplementedError

    def sort_numbers(self, numbers: list[float]) -> None:  # noqa: ARG002 - as for all
        """Sorts numbers that are in memory here, into a list that is here.

        Args:
            numbers: They.
        """
        raise harness.UnsupportedError("")

    def stop(self) -> None:
        """Stops the workers."""


def paths(files: str) -> list[Path]:
    """Returns the files of a pattern, in order."""
    pattern = Path(files)
    return sorted(pattern.parent.glob(pattern.name))


def main(engine: Engine) -> None:
    """Does what is asked, a line of JSON at a time, until nothing more is asked."""
    answers = harness.open_answers()

    def do(name: str, arguments: dict[str, Any]) -> list[float]:
        if name == "sort_numbers":
            rng = random.Random(1)  # noqa: S311 - no secret
            arguments = {"numbers": [rng.random() for _ in range(arguments["count"])]}
        start = time.perf_counter()
        result = getattr(engine, name)(**arguments)
        seconds = time.perf_counter() - start
        return [seconds] if result is None else [seconds, len(result), sum(result.values())]

    sys.stdin.readline()  # the set-up of other peers
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        harness.answer(answers, lambda name=name, request=request: do(name, request))
    engine.stop()
