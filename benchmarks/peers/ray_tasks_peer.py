"""Tasks of Ray."""

from typing import Any

import ray
import task_queues


@ray.remote
def _nothing() -> None:
    pass


class Ray(task_queues.Engine):
    """A cluster of one machine with a core for each worker."""

    def start(self, workers: int, folder: str) -> None:
        """Starts it."""
        ray.init(
            num_cpus=workers,
            log_to_driver=False,
            include_dashboard=False,
            object_store_memory=1 << 28,
            _temp_dir=folder,
        )

    def submit(self, count: int) -> list[Any]:
        """One call per task."""
        return [_nothing.remote() for _ in range(count)]

    def wait(self, submitted: list[Any]) -> None:
        """Gets all results."""
        ray.get(submitted)

    def stop(self) -> None:
        """Stops the cluster."""
        ray.shutdown()


if __name__ == "__main__":
    task_queues.main(Ray())
