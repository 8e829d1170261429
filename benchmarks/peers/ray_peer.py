"""A Ray actor with threads; clients are further drivers of the same cluster."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import harness
import ray

_NAMESPACE = "benchmark"
_HOST = "127.0.0.1"
_STORE_BYTES = 1 << 31


class RayPeer(harness.Peer):
    """Small arguments travel in messages, arrays through the object store."""

    can_share = True

    def serve(self, setup: harness.Setup) -> str:
        """Starts a cluster of one machine, and an actor."""
        self._start_cluster(setup)
        self._actor = _make_actor(name="handlers")
        ray.get(self._actor.echo.remote(harness.PAYLOAD))
        return str(ray.get_runtime_context().gcs_address)

    def connect(self, setup: harness.Setup) -> None:
        """Joins the cluster."""
        self._protect(setup)
        ray.init(setup.address, namespace=_NAMESPACE, log_to_driver=False)
        self._actor = ray.get_actor("handlers")

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the actor."""
        remote = getattr(self._actor, name).remote
        return lambda argument: ray.get(remote(argument))

    def later(self, name: str) -> Callable[..., Any]:
        """Returns a method of the actor."""
        return getattr(self._actor, name).remote

    def collect(self, futures: list[Any]) -> None:
        """Waits for results all at once, as Ray advises."""
        ray.get(futures)

    def open_shared(self, value: Any) -> Any:
        """Maps the object."""
        return ray.get(value[0])

    def close(self) -> None:
        """Leaves the cluster; the server ends it."""
        ray.shutdown()

    @contextlib.contextmanager
    def started(self, setup: harness.Setup) -> Iterator[None]:
        """Starts a cluster and its actors."""
        self._start_cluster(setup)
        actors = [_make_actor() for _ in range(setup.nodes)]
        ray.get([actor.echo.remote(harness.PAYLOAD) for actor in actors])
        yield

    def _start_cluster(self, setup: harness.Setup) -> None:
        self._protect(setup)
        ray.init(
            namespace=_NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_STORE_BYTES,
            _node_ip_address=_HOST,
            _temp_dir=f"{setup.scratch}/ray",
        )

    def _protect(self, setup: harness.Setup) -> None:
        # Otherwise Ray makes a token of its own in the home folder.
        os.environ["RAY_AUTH_TOKEN"] = setup.secret


def _make_actor(**options: Any) -> Any:
    actor = ray.remote(harness.Handlers)
    return actor.options(num_cpus=0, max_concurrency=harness.THREADS, **options).remote(_share)


def _share(array: Any) -> list[Any]:
    # In a list the reference itself is returned, not the array.
    return [ray.put(array)]


if __name__ == "__main__":
    harness.main(RayPeer())
