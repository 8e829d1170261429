"""The same with Ray: actors that put rollouts into a `ray.util.queue`; weights in its object store."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import ray
from ray.util.queue import Queue


@ray.remote(num_cpus=0)
class Generator:
    """Makes nothing, at once."""

    def work(self, prompts, made) -> None:
        """Passes prompts on as rollouts."""
        while True:
            made.put(prompts.get())


@ray.remote(num_cpus=0)
class Reader:
    """Reads weights."""

    def read(self, params) -> int:
        """Reads a byte of every page."""
        return int(params[::4096].sum())


def rollouts(generators: int, seconds: float) -> float:
    """Returns rollouts per second, with three batches of 64 ahead."""
    options = {"num_cpus": 0}
    prompts, made = Queue(actor_options=options), Queue(actor_options=options)
    actors = [Generator.remote() for _ in range(generators)]
    working = [actor.work.remote(prompts, made) for actor in actors]
    prompts.put_nowait_batch(list(range(192)))
    for _ in range(64 * generators):
        prompts.put(made.get())
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        batch = [made.get() for _ in range(64)]
        prompts.put_nowait_batch(batch)
        count += len(batch)
    del working
    return count / (time.perf_counter() - began)


def weights(readers: int, mib: int) -> float:
    """Returns the median of the seconds until all readers have the weights."""
    params, times = np.ones(mib << 20, np.uint8), []
    actors = [Reader.remote() for _ in range(readers)]
    ray.get([actor.read.remote(np.ones(1, np.uint8)) for actor in actors])
    for _ in range(7):
        params[::4096] += 1
        began = time.perf_counter()
        reference = ray.put(params)
        ray.get([actor.read.remote(reference) for actor in actors])
        times.append(time.perf_counter() - began)
        del reference
    return sorted(times)[len(times) // 2]


def main(what: str, number: int, amount: float, result: str) -> None:
    """Measures as `rollouts_peer`."""
    ray.init(log_to_driver=False, include_dashboard=False, object_store_memory=1 << 32)
    found = rollouts(number, amount) if what == "rollouts" else weights(number, int(amount))
    Path(result).write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
