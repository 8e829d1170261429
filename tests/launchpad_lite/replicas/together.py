"""Replicas as threads of the test, without a program."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

from launchpad_lite import replicas
from launchpad_lite.replicas._carrier import Carrier
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._mailbox import Box
from launchpad_lite.replicas._memory_carrier import MemoryCarrier
from launchpad_lite.replicas._state import Training
from launchpad_lite.replicas.errors import ReplicaLostError
from launchpad_lite.replicas.replicators import Here

Carriers = Sequence[Carrier]


def in_memory(size: int, processes: int = 1) -> Carriers:
    """Returns carriers of replicas; with several processes, as if these were such."""
    outer, threads = Box(), size // processes
    found: list[Carrier] = []
    for process in range(processes):
        box, between = Box(), MemoryCarrier(process, processes, outer)
        found += [MemoryCarrier(index, threads, box, between) for index in range(threads)]
    return found


def together(
    carriers: Carriers,
    story: Callable[[replicas.Replicator], Any],
    around: "Callable[[int], Any] | None" = None,
) -> list[Any]:
    """Runs a story in all replicas; returns what each has returned, or raised.

    Args:
        carriers: Of the replicas.
        story: Takes the view of one.
        around: Returns a block in which a replica runs.
    """
    outcomes: list[Any] = [None] * len(carriers)
    replicator = replicas.MultiWorkerReplicator(
        len(carriers), input_replication=replicas.InputReplication.PER_REPLICA
    )

    def run(rank: int) -> None:
        repl = copy.copy(replicator)
        try:
            with repl.being(Here(rank, Collectives(carriers[rank]), Training())):
                if around is None:
                    outcomes[rank] = story(repl)
                else:
                    with around(rank):
                        outcomes[rank] = story(repl)
        except Exception as error:  # noqa: BLE001 - it is the outcome
            outcomes[rank] = error
            carriers[rank].abort(ReplicaLostError(f"replica {rank} has failed"))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(carriers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def returned(outcomes: list[Any]) -> list[Any]:
    """Returns them; raises what a replica has raised, the cause before what it caused."""
    errors = [each for each in outcomes if isinstance(each, Exception)]
    for error in sorted(errors, key=lambda each: isinstance(each, ReplicaLostError)):
        raise error
    return outcomes
