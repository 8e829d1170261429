"""A replay buffer with Reverb, as its documentation shows it."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reverb
import tensorflow as tf
from replays import SAMPLED, SIZE, Replay, arguments, measure, transitions


def serve(sampler: str, ports: "multiprocessing.Queue[int]") -> None:
    """Runs a server until this process is ended."""
    signature = {
        name: tf.TensorSpec((1, *column.shape[1:]), column.dtype, name)
        for name, column in transitions(1).items()
    }
    table = reverb.Table(
        "main",
        reverb.selectors.Prioritized(0.6)
        if sampler == "prioritized"
        else reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        SIZE,
        reverb.rate_limiters.MinSize(1),
        signature=signature,
    )
    server = reverb.Server([table])
    ports.put(server.port)
    server.wait()


class ReverbReplay(Replay):
    """With a writer of trajectories, and a dataset."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._writer = reverb.Client(address).trajectory_writer(num_keep_alive_refs=1)

    def insert(self, item: dict[str, Any]) -> None:
        """Inserts a trajectory of one step."""
        self._begin(item)
        self._writer.flush()

    def insert_many(self, items: dict[str, Any]) -> None:
        """Inserts them without waiting for each."""
        for row in zip(*items.values(), strict=True):
            self._begin(dict(zip(items, row, strict=True)))
        self._writer.flush()

    def _begin(self, item: dict[str, Any]) -> None:
        self._writer.append(item)
        last = {name: column[-1:] for name, column in self._writer.history.items()}
        self._writer.create_item("main", 1.0, last)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Samples ahead, as much as it wants."""
        dataset = reverb.TrajectoryDataset.from_table_signature(
            self._address, "main", max_in_flight_samples_per_worker=2 * SAMPLED
        )
        for sample in dataset.batch(SAMPLED).prefetch(1).as_numpy_iterator():
            yield sample.data


def main(sampler: str, seconds: float, result: Path) -> None:
    """Measures with the server in a process of its own."""
    fresh = multiprocessing.get_context("spawn")
    ports = fresh.Queue()
    server = fresh.Process(target=serve, args=(sampler, ports), daemon=True)
    server.start()
    measure(ReverbReplay(f"localhost:{ports.get(timeout=60)}"), seconds, result)
    server.kill()


if __name__ == "__main__":
    main(*arguments())
