"""Empty rollouts, and weights for readers, with `launchpad_lite.rollouts`."""

import json
import sys
import time
from pathlib import Path

import numpy as np

import launchpad_lite as lp
from launchpad_lite import rollouts


class Generator:
    """Makes nothing, at once."""

    def generate(self, prompt, weights):  # noqa: ARG002 - what generators get
        """Returns the prompt."""
        return prompt


def train(made, seconds: float, result: Path) -> None:
    """Counts the rollouts of batches of 64."""
    made.publish(0)
    count, end = 0, float("inf")
    for batch in made.batches(groups=64):
        made.publish(0)
        if end == float("inf"):  # all generators are there
            end = time.perf_counter() + seconds
            began, count = time.perf_counter(), 0
        count += len(batch)
        if time.perf_counter() > end:
            break
    result.write_text(json.dumps(count / (time.perf_counter() - began)))
    lp.stop()


def publish(weights, meet, mib: int, result: Path) -> None:
    """Takes the median time until all readers have read a byte of every page."""
    params, times = np.ones(mib << 20, np.uint8), []
    for version in range(1, 8):
        params[::4096] += 1
        began = time.perf_counter()
        weights.publish(params)
        meet.wait_for(version)
        times.append(time.perf_counter() - began)
    result.write_text(json.dumps(sorted(times)[len(times) // 2]))
    lp.stop()


class Meeting:
    """Counts readers that have read a version."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._read: dict[int, int] = {}

    def note(self, version: int) -> None:
        """One more has read it."""
        self._read[version] = self._read.get(version, 0) + 1

    def wait_for(self, version: int) -> None:
        """Returns when all have."""
        while self._read.get(version, 0) < self._readers:
            time.sleep(0.0005)


def read(weights, meet) -> None:
    """Reads each version."""
    for params, version in weights.versions():
        params[::4096].sum()
        meet.note(version)


def main(what: str, number: int, amount: float, result: str) -> None:
    """Measures: rollouts per second of generators, or seconds until readers have some MiB."""
    program, path = lp.Program("rollouts"), Path(result)
    if what == "rollouts":
        made = rollouts.Rollouts(range(10_000), max_staleness=2, epochs=None)
        handle = made.add_to(program, generator=Generator, generators=number)
        program.add_node(lp.PyNode(train, handle, amount, path), label="trainer")
    else:
        weights = rollouts.Weights().add_to(program)
        meet = program.add_node(lp.CourierNode(Meeting, number), label="meet")
        with program.group("reader"):
            for _ in range(number):
                program.add_node(lp.PyNode(read, weights, meet))
        program.add_node(lp.PyNode(publish, weights, meet, int(amount), path), label="trainer")
    lp.launch(program, "local_mp").wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
