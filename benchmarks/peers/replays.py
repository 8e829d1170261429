"""What peers with a replay buffer share: transitions, and how fast they go in and out."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE, INSERTED, SAMPLED = 4096, 32, 256
_FRAMES = (84, 84, 4)
_STEP_S = 0.002
_PAGE_BYTES = 4096


def transitions(count: int) -> dict[str, Any]:
    """Returns some, along the first axis."""
    frames = np.random.default_rng(0).integers(0, 255, (2, count, *_FRAMES), np.uint8)
    numbers = np.zeros(count, np.int64), np.zeros(count, np.float32)
    return dict(zip(("observation", "next", "action", "reward"), (*frames, *numbers), strict=True))


class Replay:
    """A replay buffer in another process."""

    def insert(self, item: dict[str, Any]) -> None:
        """Inserts a transition, and waits until it is there."""
        raise NotImplementedError

    def insert_many(self, items: dict[str, Any]) -> None:
        """Inserts transitions, along the first axis, and waits until they are there."""
        raise NotImplementedError

    def batches(self) -> Iterator[dict[str, Any]]:
        """Samples batches without end, along the first axis."""
        raise NotImplementedError


def cpu_s() -> float:
    """Returns the seconds of CPU of all processes of this peer, which have its mark."""
    mark, ticks = f"REPLAY_PEER={os.environ['REPLAY_PEER']}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rate(call: Callable[[], object], items: int, seconds: float) -> tuple[float, float]:
    """Returns how many items per second a call handles that handles so many at once, and µs of CPU of each."""
    call()
    calls, began_at, cpu_before_s = 0, time.perf_counter(), cpu_s()
    while time.perf_counter() - began_at < seconds:
        call()
        calls += 1
    per_s = calls * items / (time.perf_counter() - began_at)
    return per_s, (cpu_s() - cpu_before_s) / (calls * items) * 1e6


def measure(replay: Replay, seconds: float, result: Path) -> None:
    """Measures inserts, then samples; each alone."""
    many = transitions(INSERTED)
    one = {name: column[0] for name, column in many.items()}

    def sample() -> None:
        for column in next(batches).values():  # reads a byte of every page
            np.asarray(column).reshape(-1).view(np.uint8)[::_PAGE_BYTES].sum()

    def learn() -> None:
        sample()
        time.sleep(_STEP_S)

    found = [
        rate(lambda: replay.insert_many(many), INSERTED, seconds),
        rate(lambda: replay.insert(one), 1, seconds),
    ]
    for _ in range(SIZE // INSERTED):  # it is full, however slow that was
        replay.insert_many(many)
    batches = replay.batches()
    found += [rate(sample, SAMPLED, seconds), rate(learn, SAMPLED, seconds)]
    result.write_text(json.dumps(found))


def arguments() -> tuple[str, float, Path]:
    """Returns what the driver says: the sampler, seconds for each figure, and the file for the result."""
    return sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
