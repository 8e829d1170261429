"""A replay buffer with `rollouts.ReplayNode`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replays import SAMPLED, SIZE, Replay, arguments, measure

import launchpad_lite as lp
from launchpad_lite import rollouts


class NodeReplay(Replay):
    """With its client."""

    def __init__(self, client: rollouts.ReplayClient) -> None:
        self.insert, self.insert_many = client.insert, client.insert_many  # type: ignore[method-assign]
        self._client = client

    def batches(self) -> Iterator[dict[str, Any]]:
        """Samples one batch ahead, as by default."""
        for batch in self._client.samples(SAMPLED):
            yield batch.items


def work(client: rollouts.ReplayClient, seconds: float, result: Path) -> None:
    """Measures in a node."""
    measure(NodeReplay(client), seconds, result)


def main(sampler: str, seconds: float, result: Path) -> None:
    """Runs the program."""
    program = lp.Program("replay")
    table = rollouts.Table("main", max_size=SIZE, sampler=sampler)
    replay = program.add_node(rollouts.ReplayNode([table]), label="replay")
    program.add_node(lp.PyNode(work, replay, seconds, result), label="measure")
    lp.launch(program, "local_mp").wait()


if __name__ == "__main__":
    main(*arguments())
