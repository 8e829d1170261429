"""Dask distributed: a scheduler and workers with one thread each."""

from typing import Any

import distributed
import task_queues


def _nothing() -> None:
    pass


class Distributed(task_queues.Engine):
    """A cluster of this machine."""

    def start(self, workers: int, folder: str) -> None:
        """Starts it."""
        self._client = distributed.Client(
            n_workers=workers, threads_per_worker=1, dashboard_address=None, local_directory=folder
        )

    def submit(self, count: int) -> list[Any]:
        """Submits; not pure, because equal calls are the same task otherwise."""
        if count == 1:
            return [self._client.submit(_nothing, pure=False)]
        return self._client.map(lambda _: None, range(count), pure=False)

    def wait(self, submitted: list[Any]) -> None:
        """Gathers."""
        self._client.gather(submitted)

    def stop(self) -> None:
        """Stops the cluster."""
        self._client.shutdown()


if __name__ == "__main__":
    task_queues.main(Distributed())
