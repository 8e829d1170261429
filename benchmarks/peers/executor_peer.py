"""The executor of this project's searches, as its documentation shows it."""

import concurrent.futures
from concurrent.futures import Future

import task_queues

from launchpad_lite import search


def _nothing() -> None:
    pass


class Executor(task_queues.Engine):
    """Workers, a broker and a name server as processes."""

    def start(self, workers: int, folder: str, *, is_durable: bool) -> None:
        """Launches them; the broker keeps its tasks in a file, or in memory."""
        kept = folder if is_durable else None
        self._executor = search.Executor(workers=workers, folder=kept)

    def submit(self, count: int) -> list[Future[None]]:
        """One call per task."""
        return [self._executor.submit(_nothing) for _ in range(count)]

    def wait(self, submitted: list[Future[None]]) -> None:
        """As for all executors."""
        concurrent.futures.wait(submitted)
        for each in submitted:
            each.result()

    def stop(self) -> None:
        """Stops the program."""
        self._executor.shutdown()


if __name__ == "__main__":
    task_queues.main(Executor())
