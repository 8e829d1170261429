"""Several nodes in one place."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from launchpad_lite.life.policies import RestartPolicy
from launchpad_lite.nodes.base import Node, PlanContext, Task, Work
from launchpad_lite.nodes.python import SilentHandle
from launchpad_lite.parts.settings import check_number
from launchpad_lite.worker.address import Address
from launchpad_lite.worker.runtime import NodeRuntime

Mode = Literal["thread", "process"]


class ColocationNode(Node[None]):
    """Runs several nodes in one place: in threads of one process, or in processes of one host.

    Do not add the inner nodes to the program; their handles, also those made before, still work.
    Calls between nodes in one process pass no socket.

    With threads the inner nodes are one node of the program: it fails when one of them does, and
    has the resources of one. With processes each is a node of its own in the group, which a
    launcher places on the same host.

    Example:
        learner, replay = lp.CourierNode(Learner), lp.CourierNode(Replay)
        learner_handle, replay_handle = learner.create_handle(), replay.create_handle()
        learner.configure(replay_handle)
        program.add_node(lp.ColocationNode([learner, replay]), label="learner")
    """

    #: When inner nodes that are processes are restarted, in place of what they say themselves.
    _restart: RestartPolicy | None = None

    def __init__(
        self,
        nodes: Iterable[Node[Any]],
        mode: Mode = "thread",
        *,
        return_on_first_completed: bool = False,
    ) -> None:
        """Describes the node.

        Args:
            nodes: The nodes, which are not added to a program themselves.
            mode: "thread" or "process".
            return_on_first_completed: The node ends, and the other inner ones are asked to, when
                the first one has ended. With threads only.

        Raises:
            TypeError: Something in `nodes` is no node.
            ValueError: There are none, one comes twice, the mode is unknown, or threads were asked
                for and one of the nodes is a colocation with processes.
        """
        super().__init__()
        self._nodes = list(nodes)
        for node in self._nodes:
            if not isinstance(node, Node):
                raise TypeError(f"a colocation consists of nodes, not of {node!r}")
        if not self._nodes:
            raise ValueError("a colocation needs at least one node")
        parts = [part for node in self._nodes for part in node.with_inner()]
        if len({id(part) for part in parts}) < len(parts):
            raise ValueError("a node can be colocated once; make one node object for each service")
        if mode not in get_args(Mode):
            raise ValueError(f"mode is 'thread' or 'process', not {mode!r}")
        if return_on_first_completed and mode == "process":
            raise ValueError("return_on_first_completed works with threads only")
        inner_modes = {part._mode for part in parts if isinstance(part, ColocationNode)}
        if mode == "thread" and "process" in inner_modes:
            raise ValueError("a colocation with processes cannot be a part of one with threads")
        self._named_after = ", ".join(node.description for node in self._nodes)
        self._mode: Mode = mode
        self._first_ends = return_on_first_completed

    @property
    def inner_nodes(self) -> Sequence[Node[Any]]:
        """The nodes it runs."""
        return tuple(self._nodes)

    @property
    def addresses(self) -> Sequence[Address]:
        """Where the inner nodes will listen."""
        inner = [address for node in self._nodes for address in node.addresses]
        return (*inner, *self._own_addresses)

    def create_handle(self) -> SilentHandle:
        """Returns a handle that only names the node; the inner ones have their own."""
        return SilentHandle(self)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:
        """Returns one task for threads, one per inner task for processes."""
        tasks = [
            dataclasses.replace(task, stands_for=(*task.stands_for, node.key))
            for node in self._nodes
            for task in node.to_executables(context)
        ]
        if self._mode == "process":
            return [
                dataclasses.replace(task, together=self.key, restart=self._restart or task.restart)
                for task in tasks
            ]
        if not tasks:
            return []
        names = _distinct([task.description for task in tasks])
        inner = tuple((name, task.work) for name, task in zip(names, tasks, strict=True))
        keys = tuple(key for task in tasks for key in task.stands_for)
        addresses = tuple(address for task in tasks for address in task.addresses)
        work = ColocatedWork(inner, self._first_ends)
        may_keep_state = any(task.may_keep_state for task in tasks)
        return [
            Task(work, addresses, self.description, stands_for=keys, may_keep_state=may_keep_state)
        ]


class MultiThreadingColocation(ColocationNode):
    """`ColocationNode` with threads, under the name it has in Launchpad.

    Example:
        program.add_node(lp.MultiThreadingColocation([lp.CourierNode(A), lp.CourierNode(B)]), label="ab")
    """

    def __init__(self, nodes: Iterable[Node[Any]], return_on_first_completed: bool = False) -> None:
        """Describes the node; see `ColocationNode`."""
        super().__init__(nodes, "thread", return_on_first_completed=return_on_first_completed)


class MultiProcessingColocation(ColocationNode):
    """`ColocationNode` with processes, under the name it has in Launchpad.

    Example:
        program.add_node(lp.MultiProcessingColocation([lp.CourierNode(A), lp.CourierNode(B)]), label="ab")
    """

    def __init__(self, nodes: Iterable[Node[Any]], num_retries_on_failure: int = 0) -> None:
        """Describes the node; see `ColocationNode`.

        Args:
            nodes: What to run.
            num_retries_on_failure: How often each inner node is restarted when it fails, unless
                `launch` sets its restarts.

        Raises:
            TypeError: It is no whole number; or as for `ColocationNode`.
            ValueError: The number is below 0; or as for `ColocationNode`.
        """
        super().__init__(nodes, "process")
        check_number("num_retries_on_failure", num_retries_on_failure, 0)
        if num_retries_on_failure:
            # So often in all, over any time.
            self._restart = RestartPolicy(
                "on_failure", max_restarts=num_retries_on_failure, window_s=math.inf
            )


def _distinct(names: Sequence[str]) -> list[str]:
    """Numbers names that come more than once, so that messages name a single node."""
    counts = dict.fromkeys(names, 0)
    distinct = []
    for name in names:
        counts[name] += 1
        distinct.append(f"{name} {counts[name]}" if names.count(name) > 1 else name)
    return distinct


@dataclass(frozen=True)
class ColocatedWork:
    """Runs the work of several nodes in threads."""

    inner: tuple[tuple[str, Work], ...]
    first_ends: bool

    def __call__(self, runtime: NodeRuntime) -> None:
        """Does it."""
        from launchpad_lite.nodes._parts import Parts

        Parts(runtime, self.inner).run(until_first=self.first_ends)

    def parts(self) -> Mapping[str, object]:
        """Returns the users' objects in the inner nodes, by names for messages."""
        return {
            f"{description}: {name}": part
            for description, work in self.inner
            for name, part in work.parts().items()
        }
