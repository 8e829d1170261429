"""A replay buffer: transitions that actors insert and a learner samples, per second.

    python -m benchmarks.replay --seconds=3

Transitions are two frames of 84x84x4 uint8, an action and a reward, in batches of 32 inserts and
256 samples. Beside it: a list of a `multiprocessing.Manager` with the same; and Reverb, if that is
installed. Each is measured alone: first inserts, then samples.
"""

import argparse
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np  # noqa: TID253 - what it measures is about numpy

import launchpad_lite as lp
from benchmarks.environments import machine
from launchpad_lite import rollouts

_SIZE, _INSERTED, _SAMPLED = 4096, 32, 256
_FRAMES = (84, 84, 4)
_STEP_S = 0.002


def transitions(count: int) -> dict[str, Any]:
    """Returns some, along the first axis."""
    frames = np.random.default_rng(0).integers(0, 255, (count, *_FRAMES), np.uint8)
    zeros = np.zeros(count, np.float32)
    return {"observation": frames, "next": frames, "action": zeros.astype(int), "reward": zeros}


def rate(call: Callable[[], object], items: int, seconds: float) -> float:
    """Returns how many items per second a call handles that handles so many at once."""
    call()
    calls, began_at = 0, time.perf_counter()
    while time.perf_counter() - began_at < seconds:
        call()
        calls += 1
    return calls * items / (time.perf_counter() - began_at)


def learn(batches: Iterator[Any], seconds: float) -> float:
    """Returns how many samples per second a learner gets that works for a while with each batch."""

    def step() -> None:
        next(batches)
        time.sleep(_STEP_S)

    return rate(step, _SAMPLED, seconds)


def measure_node(replay: rollouts.ReplayClient, seconds: float, sampler: str) -> None:
    """Measures a `ReplayNode`, in another process."""
    batch, one = transitions(_INSERTED), {key: leaf[0] for key, leaf in transitions(1).items()}
    singly = rate(lambda: replay.insert(one), 1, seconds)
    inserts = rate(lambda: replay.insert_many(batch), _INSERTED, seconds)
    samples = rate(lambda: replay.sample(_SAMPLED), _SAMPLED, seconds)
    waiting, ahead = (learn(replay.samples(_SAMPLED, ahead=n), seconds) for n in (0, 1))
    print(
        f"ReplayNode, {sampler}: {singly:,.0f} inserts/s singly, {inserts:,.0f} in batches, "
        f"{samples:,.0f} samples/s; with {_STEP_S * 1e3:g} ms of work for each batch, "
        f"{waiting:,.0f}/s, and {ahead:,.0f}/s ahead",
        flush=True,
    )


def measure_manager(seconds: float) -> None:
    """Measures a list of a manager."""
    with multiprocessing.Manager() as manager:
        kept = manager.list()
        many = transitions(_INSERTED)
        items = [{key: leaf[n] for key, leaf in many.items()} for n in range(_INSERTED)]

        def insert() -> None:
            kept.extend(items)
            if len(kept) > _SIZE:
                del kept[:_INSERTED]

        def sample() -> None:
            places = np.random.default_rng().integers(len(kept), size=_SAMPLED)
            chosen = [kept[place] for place in places.tolist()]
            for key in many:
                np.stack([each[key] for each in chosen])

        inserts, samples = rate(insert, _INSERTED, seconds), rate(sample, _SAMPLED, seconds)
        print(f"list of a manager: {inserts:,.0f} inserts/s in batches, {samples:,.0f} samples/s")


def measure_reverb(seconds: float) -> None:
    """Measures Reverb's client."""
    import reverb

    table = reverb.Table(
        "main",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        _SIZE,
        reverb.rate_limiters.MinSize(1),
    )
    client = reverb.Client(f"localhost:{reverb.Server([table]).port}")
    one = [leaf[0] for leaf in transitions(1).values()]
    inserts = rate(lambda: client.insert(one, {"main": 1.0}), 1, seconds)
    samples = rate(lambda: list(client.sample("main", _SAMPLED)), _SAMPLED, seconds)
    print(f"Reverb: {inserts:,.0f} inserts/s singly, {samples:,.0f} samples/s")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    seconds = parser.parse_args().seconds
    print(machine())
    for sampler in ("uniform", "prioritized"):
        program = lp.Program("replay")
        table = rollouts.Table("main", max_size=_SIZE, sampler=sampler)
        replay = program.add_node(rollouts.ReplayNode([table]), label="replay")
        program.add_node(lp.PyNode(measure_node, replay, seconds, sampler), label="measure")
        lp.launch(program, "local_mp").wait()
    measure_manager(seconds)
    if importlib.util.find_spec("reverb") is not None:
        measure_reverb(seconds)


if __name__ == "__main__":
    main()
