"""Replicas in threads, over process groups of PyTorch."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import courier
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._torch_carrier import KeyValues, TorchCarrier
from launchpad_lite.replicas.errors import ReplicaLostError


def run_carriers(size: int, function: Callable[[TorchCarrier], Any]) -> list[Any]:
    """Returns what a function returns for the carrier of each replica; all run at the same time."""
    results: list[Any] = [None] * size
    errors: list[Exception] = []
    with courier.Server(KeyValues()) as server:
        clients = [courier.Client(server.address) for _ in range(size)]
        carriers = [
            TorchCarrier(client, rank, size, host="127.0.0.1")
            for rank, client in enumerate(clients)
        ]

        def run(rank: int) -> None:
            try:
                carriers[rank].connect()
                results[rank] = function(carriers[rank])
                carriers[rank].close()
            except Exception as error:  # noqa: BLE001  # raised below
                errors.append(error)
                for carrier in carriers:
                    carrier.abort(error)
                carriers[rank].close()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for client in clients:
            courier.close(client)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, ReplicaLostError))  # the cause
    return results


def run_replicas(
    size: int, function: Callable[..., Any], inputs: Sequence[Any] | None = None
) -> list[Any]:
    """Returns what a function returns in each replica, for its collectives and its input, if any."""

    def run(carrier: TorchCarrier) -> Any:
        collectives = Collectives(carrier)
        mine = () if inputs is None else (inputs[carrier.rank],)
        try:
            return function(collectives, *mine)
        except Exception as error:
            collectives.abort(error)  # so that this does not wait for the others
            raise
        finally:
            collectives.close()

    return run_carriers(size, run)
