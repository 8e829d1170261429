"""Ray's pattern of an asynchronous parameter server: actors, and a driver that waits for them."""

import time

import ray
import updates


@ray.remote(num_cpus=0)
class Server:
    """Has the value."""

    def __init__(self, size: int) -> None:
        self._value = updates.value(size)
        self._updates = 0

    def apply(self, update):
        """Applies an update; returns the value."""
        self._value = self._value + update
        self._updates += 1
        return self._value

    def get(self):
        """Returns the value."""
        return self._value

    def updates(self) -> int:
        """Returns how many were applied."""
        return self._updates


@ray.remote(num_cpus=0)
class Worker:
    """Computes updates."""

    def __init__(self, size: int) -> None:
        self._update = updates.value(size)

    def push(self, value):
        """Returns an update."""
        updates.touch(value)
        return self._update


class Ray(updates.Engine):
    """A cluster of one machine."""

    def start(self, workers: int, size: int) -> None:
        """Starts it, and the actors."""
        ray.init(log_to_driver=False, include_dashboard=False, object_store_memory=1 << 32)
        self._server = Server.remote(size)
        value = self._server.get.remote()
        some = [Worker.remote(size) for _ in range(workers)]
        self._running = {worker.push.remote(value): worker for worker in some}

    def work(self, seconds: float) -> None:
        """Hands each update to the server, and the value to the worker that made it."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            [update], _ = ray.wait(list(self._running))
            worker = self._running.pop(update)
            value = self._server.apply.remote(update)
            self._running[worker.push.remote(value)] = worker

    def updates(self) -> int:
        """Asks the server."""
        return ray.get(self._server.updates.remote())

    def stop(self) -> None:
        """Stops the cluster."""
        ray.shutdown()


if __name__ == "__main__":
    updates.main(Ray())
