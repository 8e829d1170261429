"""HyperQueue: its tasks are processes, here `true`, started by one worker with a core for each."""

import hyperqueue
import task_queues
from hyperqueue.cluster import LocalCluster, WorkerConfig


class HyperQueue(task_queues.Engine):
    """A server and a worker; each submission is a job."""

    rate_s = 6.0  # `wait_for_jobs` looks once a second

    def start(self, workers: int, folder: str) -> None:
        """Starts them."""
        self._cluster = LocalCluster(folder)
        self._cluster.start_worker(WorkerConfig(cores=workers))
        self._client = self._cluster.client()

    def submit(self, count: int) -> hyperqueue.client.SubmittedJob:
        """One job for all; `true` writes nothing, so no files are made for it."""
        job = hyperqueue.Job()
        for _ in range(count):
            job.program(["true"], stdout=None, stderr=None)
        return self._client.submit(job)

    def wait(self, submitted: hyperqueue.client.SubmittedJob) -> None:
        """Waits for the job."""
        self._client.wait_for_jobs([submitted])

    def stop(self) -> None:
        """Stops both."""
        self._cluster.stop()


if __name__ == "__main__":
    task_queues.main(HyperQueue())
