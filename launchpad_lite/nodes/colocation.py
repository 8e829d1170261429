"""Several nodes in one place."""

import contextlib
import contextvars
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import courier
from launchpad_lite._address import Address
from launchpad_lite._policies import Liveness, RestartPolicy
from launchpad_lite._result import CONSEQUENCES
from launchpad_lite._runtime import NodeRuntime, WorkerLink
from launchpad_lite.nodes.base import Node, PlanContext, Task, Work
from launchpad_lite.nodes.python import SilentHandle

Mode = Literal["thread", "process"]

#: How long threads that were forced out may take to clean up. Less than a supervisor waits until it
#: gives up the node they are parts of.
_FORCED_S = 1.0
#: How long nodes that do not look at the stop may go on to call.
_UNAWARE_S = 0.5
#: Seconds that stop handlers of a node have once its code has ended.
_HANDLERS_S = 2.0
_LOOK_S = 0.2

_LOGGER = logging.getLogger(__name__)


class ColocationNode(Node[Any]):
    """Runs several nodes in one place: in threads of one process, or in processes of one host.

    Do not add the inner nodes to the program; their handles, also those made before, work as ever.
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

    def __init__(
        self,
        nodes: Iterable[Node[Any]],
        mode: Mode = "thread",
        *,
        return_on_first_completed: bool = False,
    ) -> None:
        """Describes the node.

        Args:
            nodes: What to run; not added to a program themselves.
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
        self._mode: Mode = mode
        self._first_ends = return_on_first_completed

    @property
    def inner_nodes(self) -> Sequence[Node[Any]]:
        """The nodes it runs."""
        return tuple(self._nodes)

    @property
    def addresses(self) -> Sequence[Address]:
        """Where the inner nodes will listen."""
        return tuple(address for node in self._nodes for address in node.addresses)

    @property
    def description(self) -> str:
        """For people, like `ColocationNode(CourierNode(Learner), PyNode(main))`."""
        names = [node.description for node in self._nodes]
        return f"{type(self).__name__}({', '.join(names)})"

    def create_handle(self) -> SilentHandle:
        """Returns a handle that only names the node; the inner ones have their own."""
        return SilentHandle(self, self.description)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:
        """Returns one task for threads, one per inner task for processes."""
        tasks = [
            dataclasses.replace(task, stands_for=(*task.stands_for, node.key))
            for node in self._nodes
            for task in node.to_executables(context)
        ]
        if self._mode == "process":
            return [self._placed(task) for task in tasks]
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

    def _placed(self, task: Task) -> Task:
        return dataclasses.replace(task, together=self.key)


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
                `launch` says something about its restarts.

        Raises:
            TypeError: It is no whole number; or as for `ColocationNode`.
            ValueError: The number is below 0; or as for `ColocationNode`.
        """
        super().__init__(nodes, "process")
        what = f"num_retries_on_failure={num_retries_on_failure!r} is no number of tries"
        if isinstance(num_retries_on_failure, bool) or not isinstance(num_retries_on_failure, int):
            raise TypeError(what)
        if num_retries_on_failure < 0:
            raise ValueError(what)
        self._retries = num_retries_on_failure

    def _placed(self, task: Task) -> Task:
        if self._retries:
            # So often in all, however long it runs.
            policy = RestartPolicy("on_failure", max_restarts=self._retries, window_s=math.inf)
            task = dataclasses.replace(task, restart=policy)
        return super()._placed(task)


def _distinct(names: Sequence[str]) -> list[str]:
    """Numbers names that come more than once, so that messages tell which node they mean."""
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
        together = _Together(runtime, self.inner)
        with runtime.hosting(together.runtimes):
            together.run(until_first=self.first_ends)

    def parts(self) -> Mapping[str, object]:
        """Returns what users put into the inner nodes, by names for messages."""
        return {
            f"{description}: {name}": part
            for description, work in self.inner
            for name, part in work.parts().items()
        }


class _Member(WorkerLink):
    """One inner node. Its failures and signs of life are those of the whole: see `NodeRuntime.hosting`."""

    def __init__(self, together: "_Together", index: int, description: str, work: Work) -> None:
        outer = together.outer
        setup = outer.setup._replace(
            # Whether they live is asked of the process they are in.
            liveness=Liveness(),
            checkpoints=outer.setup.checkpoints and outer.setup.checkpoints.of_part(index),
        )
        self.description = description
        self.runtime = NodeRuntime(setup, outer.table, self)
        self._together = together
        self._work = work
        #: None until the object is there.
        self.runs: bool | None = None
        #: Whether it ever had something to run; a colocation may have had, and only serve by now.
        self.had_work = False
        self.listens = False
        self.has_left = False
        self.is_over = False
        self.error: BaseException | None = None
        self._handlers = threading.Thread(
            target=self.runtime.run_stop_handlers, name="launchpad-stop-handlers", daemon=True
        )
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self._run,), name=f"{outer.name} {description}", daemon=True
        )

    def _run(self) -> None:
        try:
            with self.runtime.active():
                self.runtime.forcing.run(lambda: self._work(self.runtime))
        except BaseException as error:  # noqa: BLE001 - the outer thread raises it
            if not self.runtime.leaves_in_order(error):
                self.error = error
            else:
                self._together.outer.note_cut_short(error)
        finally:
            self._together.note_end(self)

    @property
    def has_ended(self) -> bool:
        """Whether its code runs no more."""
        # Forced out of the last step, a thread may end without a word.
        return self.is_over or (self.thread.ident is not None and not self.thread.is_alive())

    def force(self) -> None:
        """Ends its thread at the next step of Python code."""
        self.runtime.force()

    def call_stop_handlers(self) -> None:
        """Calls its stop handlers, once; they may block."""
        if not self._handlers.ident:
            with contextlib.suppress(RuntimeError):  # the interpreter ends already
                self._handlers.start()

    def join_stop_handlers(self, give_up_at: float) -> None:
        """Waits until its stop handlers have returned, or for the time when that takes too long."""
        if self._handlers.is_alive():
            self._handlers.join(min(max(0.0, give_up_at - time.monotonic()), _HANDLERS_S))

    # What the inner node says

    def constructed(self, runs: bool) -> None:
        with self._together.changed():
            self.runs = runs
            self.had_work = self.had_work or runs

    def ask_stop(self) -> None:
        self._together.outer.ask_stop()

    def leaving(self) -> None:
        with self._together.changed():
            self.has_left = True
        self.runtime.let_go()

    def stop_received(self, listens: bool) -> None:
        self.listens = listens
        if all(member.listens or member.is_over for member in self._together.members):
            self._together.outer.listen()


class _Together:
    """Inner nodes that run in threads of this process."""

    def __init__(self, outer: NodeRuntime, inner: Sequence[tuple[str, Work]]) -> None:
        self.outer = outer
        self._changed = threading.Condition()
        self.members: list[_Member] = []
        #: How members failed, the first one first.
        self._errors: list[tuple[_Member, BaseException]] = []
        for index, (description, work) in enumerate(inner):
            self.members.append(_Member(self, index, description, work))

    @property
    def runtimes(self) -> list[NodeRuntime]:
        """Of the inner nodes."""
        return [member.runtime for member in self.members]

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Changes something that `run` waits for."""
        with self._changed:
            yield
            self._changed.notify_all()

    def note_end(self, member: _Member) -> None:
        """Takes note that one has ended."""
        with self.changed():
            member.is_over = member.has_left = True
            if member.error is not None:
                self._errors.append((member, member.error))

    def run(self, *, until_first: bool) -> None:
        """Runs all to their end, or to the first failure or, if wanted, the first end."""
        try:
            for member in self.members:
                member.thread.start()
            self._wait(lambda: self._are_constructed() or (until_first and self._ended() > 0))
            if not self._errors:
                with self.outer.at_work(runs=any(member.had_work for member in self.members)):
                    self._wait_for_work(until_first)
            self._end()
        except BaseException:
            # We are being ended by force ourselves: there is no time left to ask.
            self._force()
            raise
        self._raise_failure()

    def _are_constructed(self) -> bool:
        return all(member.runs is not None or member.is_over for member in self.members)

    def _ended(self) -> int:
        return sum(member.has_ended for member in self.members)

    def _wait_for_work(self, until_first: bool) -> None:
        if until_first:
            self._wait(lambda: self._ended() > 0)
            return
        if any(member.had_work for member in self.members):
            # One that runs may become one that serves, as a colocation in this one does.
            self._wait(lambda: all(member.has_left or not member.runs for member in self.members))
            if not self._errors and any(not member.has_left for member in self.members):
                # The others only serve: the program need not wait for them.
                self.outer.only_serves()
        self._wait(lambda: self._ended() == len(self.members))

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            while not condition() and not self._errors:
                # Not for ever: a thread that is ended by force notices it only between two waits.
                self._changed.wait(_LOOK_S)

    def _raise_failure(self) -> None:
        if not self._errors:
            return
        # Who called one that failed may have failed of it, and have ended first.
        causes = [each for each in self._errors if not isinstance(each[1], CONSEQUENCES)]
        member, error = (causes or self._errors)[0]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"in {member.description}, one of the nodes of {self.outer.name}")
        raise error

    def _end(self) -> None:
        """Ends those that still run: they are asked and then, when the notice is over, forced."""
        if self._ended() == len(self.members):
            return
        self._ask()
        notice_s = self.outer.setup.notice_s
        give_up_at = time.monotonic() + (notice_s if notice_s >= 0 else math.inf)
        self._join(min(give_up_at, time.monotonic() + _UNAWARE_S))
        if any(not member.has_ended and not member.listens for member in self.members):
            # As `NodeRuntime.end_calls`; all clients that came as handles are those of the whole.
            self.outer.clients.do(courier.stop_calling)
        self._join(give_up_at)
        if self._ended() < len(self.members):
            self._force()

    def _ask(self) -> None:
        for member in self.members:
            if not member.has_ended:
                member.call_stop_handlers()
            member.runtime.request_stop()
        self.outer.clients.do(courier.stop_waiting)

    def _force(self) -> None:
        forced = [member for member in self.members if not member.has_ended]
        if not forced:
            return
        # Their ways out may ask whether they were asked to stop.
        self._ask()
        self.outer.clients.close(f"{self.outer.name} is ended by force")
        for member in forced:
            member.force()
        self._join(time.monotonic() + _FORCED_S)
        for member in forced:
            how = "ended by force" if member.has_ended else "could not be ended and was left behind"
            _LOGGER.warning("%s: %s %s", self.outer.name, member.description, how)

    def _join(self, give_up_at: float) -> None:
        with self._changed:
            while self._ended() < len(self.members):
                left = give_up_at - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, _LOOK_S))
        for member in self.members:
            member.join_stop_handlers(give_up_at)
