"""Parsl with its executor for clusters, on this machine."""

import os
import sys
from concurrent.futures import Future
from pathlib import Path

import parsl
import task_queues
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider


@parsl.python_app
def _nothing() -> None:
    pass


class Parsl(task_queues.Engine):
    """One block with workers."""

    def start(self, workers: int, folder: str) -> None:
        """Starts it; it looks for its own scripts on the path."""
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        executor = HighThroughputExecutor(
            address="127.0.0.1",
            cores_per_worker=0.01,  # or there are no more workers than cores
            max_workers_per_node=workers,
            provider=LocalProvider(init_blocks=1, max_blocks=1),
        )
        parsl.load(Config([executor], run_dir=folder, strategy="none"))

    def submit(self, count: int) -> list[Future[None]]:
        """One call per task."""
        return [_nothing() for _ in range(count)]

    def wait(self, submitted: list[Future[None]]) -> None:
        """Waits for each."""
        for each in submitted:
            each.result()

    def stop(self) -> None:
        """Stops all."""
        parsl.dfk().cleanup()


if __name__ == "__main__":
    task_queues.main(Parsl())
