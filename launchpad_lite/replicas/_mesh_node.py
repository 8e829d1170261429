"""A node with several replicas: threads, each with a device of JAX."""

import copy
import logging
from typing import Any

from launchpad_lite.parts.threads import start_thread
from launchpad_lite.replicas import _devices
from launchpad_lite.replicas._carrier import Carrier
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._mailbox import Box
from launchpad_lite.replicas._meeting import Generation
from launchpad_lite.replicas._memory_carrier import JaxCarrier, JaxMesh
from launchpad_lite.replicas._node import RESULTS, ReplicaNode
from launchpad_lite.replicas._state import Training
from launchpad_lite.replicas.errors import (
    CollectiveMismatchError,
    InterruptedTraining,
    ReplicaError,
    ReplicaLostError,
)

_LOGGER = logging.getLogger(__name__)
#: Seconds between checks whether this thread is to end.
_LOOK_S = 0.2


class MeshNode(ReplicaNode):
    """All replicas of a worker as a node. For the other workers, it is one replica."""

    def run(self) -> None:
        repl = self._replicator
        count = repl.replicas_per_worker * repl.devices_per_replica
        devices = _devices.of_jax(count)
        if devices[0].platform != "tpu":
            kind = "virtual CPU" if devices[0].platform == "cpu" else devices[0].platform
            _LOGGER.warning(
                "there is no TPU here; %d %s devices of JAX take its place", count, kind
            )
        self._devices = devices[:: repl.devices_per_replica]
        super().run()

    def _carrier(self, generation: Generation) -> Carrier:
        self._outer = super()._carrier(generation)
        return self._outer

    def _replicate(self, generation: Generation, collectives: Collectives) -> list[Any]:  # noqa: ARG002
        box, mesh = Box(), JaxMesh(self._devices)
        results: list[list[Any]] = []
        errors: list[tuple[int, BaseException]] = []

        def replicate(index: int) -> None:
            carrier = JaxCarrier(index, mesh, box, self._outer)
            try:
                results.append(self._replicate_one(index, generation, carrier))
            except BaseException as error:  # noqa: BLE001 - raised in the thread of the node
                errors.append((carrier.rank, error))
                lost = ReplicaLostError(f"replica {carrier.rank} of {self._group} has failed")
                box.fail(lost)

        threads = [
            start_thread(replicate, index, name=f"replica-{index}")
            for index in range(len(self._devices))
        ]
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_LOOK_S)
        finally:
            box.fail(ReplicaLostError(f"{self._name} has ended"))
        if not errors:
            return results[0]
        rank, error = errors[0]
        # These name their replica already.
        if isinstance(error, (CollectiveMismatchError, ReplicaLostError, InterruptedTraining)):
            raise error
        what = f"replica {rank} of {self._group}: {type(error).__name__}: {error}"
        raise ReplicaError(what) from error

    def _replicate_one(self, index: int, generation: Generation, carrier: Carrier) -> list[Any]:
        """Runs the user's code for one of the replicas; returns the results of all."""
        collectives = Collectives(carrier)
        repl = copy.copy(self._replicator)  # each thread has its own view
        replicas = [node for node in self._replicas for _ in range(repl.replicas_per_worker)]
        is_first = index == 0  # it alone serves methods and keeps the training
        training = self._training if is_first else Training()
        here = self._here(generation, collectives, training, replicas)
        try:
            with _devices.on_device_of_jax(self._devices[index]), repl.being(here):
                result = self._run_body(repl, is_served=is_first)
            return collectives.all_gather(result, RESULTS)
        finally:
            collectives.close()
