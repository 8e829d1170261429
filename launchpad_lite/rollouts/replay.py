"""Replay buffers: actors insert items, learners sample them. Terms are those of Reverb."""

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import courier
import launchpad_lite as lp
from launchpad_lite.parts.nests import described, difference, leaves, rebuilt
from launchpad_lite.parts.settings import check_number
from launchpad_lite.rollouts._patience import RETRY_S, Lateness
from launchpad_lite.rollouts._replay_node import ReplayCall, ReplayServer
from launchpad_lite.rollouts.errors import ItemError, ReplayTimeoutError, UnknownTableError
from launchpad_lite.rollouts.results import TableInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from launchpad_lite.rollouts._table import SampledItems

#: Seconds for which a call waits, before it is made again.
_POLL_S = 1.0
#: After an insert that has to wait, so many go to the call that may wait: others would travel twice.
_MAY_WAIT = 20
#: The place of observations in items of an `NStepWriter`.
_OBSERVATION = "item['observation']"

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of a replay buffer: which items it keeps, which are sampled, and who has to wait.

    Attributes:
        name: Of the table.
        max_size: How many items it keeps.
        sampler: Which item is sampled: "uniform": any; "prioritized": by its share in all
            priorities; "fifo": the oldest; "lifo": the newest.
        remover: Which item goes when a full table gets another one; as `sampler`.
        priority_exponent: Of priorities, as weights of "prioritized".
        max_times_sampled: An item goes when it was sampled so often; 0: it stays.
        min_size: Samples wait until there are so many items.
        samples_per_insert: How often an item is sampled on average: inserts wait for samples, and
            samples for inserts. None: nobody waits for that.
        error_buffer: By how many samples the two may be off. A batch waits until the table allows
            all of it, so it has at most twice as many. None: a tenth of the samples of `min_size`
            items, or what the ratio needs at least.

    Raises:
        ValueError: A value is out of its range, or samples or inserts could wait forever.

    Example:
        table = rollouts.Table("main", max_size=100_000, sampler="prioritized", min_size=1000)
        queue = rollouts.Table(
            "queue",
            max_size=65,  # inserts wait before it is full
            sampler="fifo",
            max_times_sampled=1,
            samples_per_insert=1,
            error_buffer=64,
        )
    """

    name: str = "main"
    _: dataclasses.KW_ONLY
    max_size: int
    sampler: str = "uniform"
    remover: str = "fifo"
    priority_exponent: float = 1.0
    max_times_sampled: int = 0
    min_size: int = 1
    samples_per_insert: float | None = None
    error_buffer: float | None = None

    def __post_init__(self) -> None:
        kinds = ("uniform", "prioritized", "fifo", "lifo")
        ratio = 1.0 if self.samples_per_insert is None else self.samples_per_insert
        least = 2 * max(1.0, ratio)
        if self.error_buffer is None:
            object.__setattr__(self, "error_buffer", max(least, 0.1 * ratio * self.min_size))
        for name, lowest in (("max_size", 1), ("max_times_sampled", 0), ("min_size", 1)):
            check_number(f"Table {self.name!r}: {name}", getattr(self, name), lowest)
        buffer = self.error_buffer or 0.0
        for name, is_good, wanted in (
            ("sampler", self.sampler in kinds, f"one of {kinds}"),
            ("remover", self.remover in kinds, f"one of {kinds}"),
            ("priority_exponent", 0 <= self.priority_exponent < math.inf, "finite and at least 0"),
            ("min_size", self.min_size <= self.max_size, f"at most max_size={self.max_size}"),
            ("samples_per_insert", 0 < ratio < math.inf, "finite and above 0, or None"),
            ("error_buffer", buffer >= least, f"at least {least:g}: all could wait forever"),
            (
                "max_times_sampled",
                self.samples_per_insert is None or not 0 < self.max_times_sampled < ratio,
                f"0 or at least samples_per_insert={ratio:g}: all could wait forever",
            ),
        ):
            if not is_good:
                raise ValueError(
                    f"Table {self.name!r}: {name} is {wanted}, not {getattr(self, name)!r}"
                )


class ReplayBatch(NamedTuple):
    """A batch of sampled items. Arrays belong to the caller.

    Attributes:
        items: A nest as that of an item; each array has the items along its first axis. After it,
            those of sequences have the steps.
        keys: Of the items, for `update_priorities`.
        probabilities: With which each was chosen.
        times_sampled: How often each was sampled, with this batch.
        priorities: Of the items.
        table_size: How many items the table had.

    Example:
        batch = replay.sample(256)
        weights = (batch.table_size * batch.probabilities) ** -0.6  # of importance sampling
        loss = (weights * errors(batch.items["observation"]) ** 2).mean()
    """

    items: Any
    keys: "npt.NDArray[np.int64]"
    probabilities: "npt.NDArray[np.float64]"
    times_sampled: "npt.NDArray[np.int64]"
    priorities: "npt.NDArray[np.float64]"
    table_size: int


class _Patience:
    """Waits for one insert or sample: until its deadline, and says for what."""

    def __init__(self, table: str, who: str, timeout_s: float | None, token: int) -> None:
        self._table, self._who, self._token = table, who, token
        self._lateness = Lateness(_LOGGER)
        self._timeout_s = math.inf if timeout_s is None else timeout_s

    def call(self) -> ReplayCall:
        """Returns who calls, and how long it waits."""
        waited_s = self._lateness.waited_s()
        wait_s = max(0.0, min(_POLL_S, self._timeout_s - waited_s))
        return ReplayCall(self._table, self._token, self._who, waited_s, wait_s)

    def result(self, ask: Callable[[], Any], *, is_own: bool = True) -> Any:
        """Returns a result; a text says for what it waits. `is_own`: it was asked by `call`."""
        try:
            found = ask()
        except courier.ServerGoneError:
            time.sleep(RETRY_S)
            found = "the replay buffer does not answer; it may be starting again"
        if not isinstance(found, str) or not found:
            return found
        if _is_to_stop():
            raise courier.CallCancelledError(f"this node is to stop; {found}")
        with contextlib.suppress(lp.NoProgramError):  # in a thread of the user's own
            lp.heartbeat()  # a node that waits is not hung
        if is_own and self._lateness.waited_s() >= self._timeout_s:
            raise ReplayTimeoutError(found)
        self._lateness.warn(f"waits {self._lateness.waited_s():.0f} s: {found}")
        return found


def _is_to_stop() -> bool:
    try:
        return lp.stop_event().is_set()
    except lp.NoProgramError:  # a client outside of the program
        return False


class _ItemStream:
    """Sends items, one batch after the other, each once."""

    def __init__(self, node: Any, table: str, who: str) -> None:
        self._node, self._table, self._who = node, table, who
        self._lock = threading.Lock()
        self._number = 0
        #: How many of the next inserts go to the call that may wait.
        self._may_wait = 0
        self.key = secrets.randbits(62)
        #: Leaves of the newest items by type and shape, and what `send` takes for these.
        self.newest_shape: tuple[tuple[Any, ...], tuple[dict[str, str], bytes]] = (), ({}, b"")

    def send(
        self,
        shape: tuple[dict[str, str], bytes],
        priorities: Sequence[float],
        own: Sequence[Any],
        timeout_s: float | None,
        steps: Callable[[bool], Any] = lambda _: None,
    ) -> None:
        """Inserts items: as in `SentItems`.

        The shape is structure and skeleton: a nest of numbers, of own leaves and then of those of steps.
        `steps` returns all steps (True), or those that were not sent yet.
        """
        from launchpad_lite.rollouts._table import MissingStepsError, SentItems

        patience = _Patience(self._table, self._who, timeout_s, self.key)
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise ReplayTimeoutError(
                f"table {self._table!r}: another thread of {self._who} inserts for {timeout_s} s"
            )
        try:
            sent = SentItems(self.key, self._number, *shape, priorities, own, steps(False))

            def insert() -> str:
                if self._may_wait:
                    self._may_wait -= 1
                elif self._node.insert_now(self._table, sent):
                    return ""
                else:
                    self._may_wait = _MAY_WAIT
                return cast("str", self._node.insert(patience.call(), sent))

            while True:
                try:
                    if not patience.result(insert):
                        return
                except MissingStepsError:
                    sent = sent._replace(steps=steps(True))
        finally:
            self._number += len(priorities)
            self._lock.release()


class ReplayClient:
    """A replay buffer, seen from any node: what its handle becomes. Thread-safe.

    A buffer that is lost is called again until it is back; a batch that was on its way is lost.
    An item is inserted once, also if the connection breaks meanwhile.

    `table` names the table to use. `timeout_s` has the seconds to wait for its limiter; None: without
    limit. `batch_size` of writers says how many items are sent at once.

    Raises:
        ItemError: An item has another structure than the first one, or is not made of arrays.
        UnknownTableError: No table has this name.
        ValueError: A priority is negative, not finite or above 1e200, or another number is too low.
        ReplayTimeoutError: The limiter did not open in time.
        courier.CallCancelledError: This node is to stop.

    Example:
        class Learner:
            def __init__(self, replay: rollouts.ReplayClient):
                self._replay = replay

            def run(self):
                for batch in self._replay.samples(256):
                    errors = self.learn(batch.items)
                    self._replay.update_priorities(batch.keys, abs(errors))
    """

    def __init__(self, node: Any, tables: Sequence[str]) -> None:
        """Makes one; the handle does that."""
        self._node = node
        self._tables = tables
        try:
            self._who = lp.current_node().name
        except lp.NoProgramError:
            self._who = "a client outside of the program"
        self._streams = {name: self._new_stream(name) for name in tables}

    def __reduce__(self) -> Any:
        return ReplayClient, (self._node, self._tables)

    def _known(self, table: str) -> str:
        if table not in self._tables:
            raise UnknownTableError(
                f"no table is called {table!r}; there are {', '.join(map(repr, self._tables))}"
            )
        return table

    def _new_stream(self, table: str) -> _ItemStream:
        return _ItemStream(self._node, self._known(table), self._who)

    def insert(
        self,
        item: Any,
        priority: float = 1.0,
        *,
        table: str = "main",
        timeout_s: float | None = None,
    ) -> None:
        """Inserts an item: arrays and numbers, in dicts, lists and tuples.

        It is copied: arrays may change afterwards. The priority is at least 0.
        """
        stream = self._streams[self._known(table)]
        found = {where: leaf[None] for where, leaf in _arrays(item, "item").items()}
        self._insert(stream, item, found, 1, priority, timeout_s)

    def insert_many(
        self,
        items: Any,
        priorities: Any = 1.0,
        *,
        table: str = "main",
        timeout_s: float | None = None,
    ) -> None:
        """Inserts items, in one call; some may be inserted before it has waited too long.

        `items` is a nest as that of one item, whose arrays have equally many items along their first
        axis. There is one priority for each item, or one for all.
        """
        stream = self._streams[self._known(table)]
        found = _arrays(items, "item")
        for where, leaf in found.items():
            if not leaf.ndim:
                raise ItemError(f"insert_many: {where} is no array with the items along an axis")
        counts = {leaf.shape[0] for leaf in found.values()}
        count = counts.pop()
        if counts:
            raise ItemError(
                "insert_many: arrays do not have equally many items in their first axis"
            )
        if count:
            self._insert(stream, items, found, count, priorities, timeout_s)

    def _insert(
        self,
        stream: _ItemStream,
        items: Any,
        found: "dict[str, npt.NDArray[Any]]",
        count: int,
        priorities: Any,
        timeout_s: float | None,
    ) -> None:
        import numpy as np

        weights = np.asarray(priorities, float)
        if weights.shape not in ((), (count,)):
            raise ValueError(f"priorities have the shape {weights.shape} for {count} items")
        key = tuple((where, leaf.dtype, leaf.shape[1:]) for where, leaf in found.items())
        known, shape = stream.newest_shape
        if known != key:
            structure = {where: described(leaf, 1) for where, leaf in found.items()}
            shape = structure, courier.dumps((_numbered(items, 0), False))
            stream.newest_shape = key, shape
        stream.send(shape, np.full(count, weights).tolist(), list(found.values()), timeout_s)

    def sequence_writer(
        self,
        length: int,
        period: int = 1,
        *,
        table: str = "main",
        batch_size: int = 1,
        timeout_s: float | None = None,
    ) -> "SequenceWriter":
        """Returns a writer of items that are `length` steps in a row.

        An item begins `period` steps after the one before; below `length`, they overlap.
        """
        return SequenceWriter(self._new_stream(table), (batch_size, timeout_s), length, period)

    def n_step_writer(
        self,
        n: int,
        discount: float = 1.0,
        *,
        table: str = "main",
        batch_size: int = 1,
        timeout_s: float | None = None,
    ) -> "NStepWriter":
        """Returns a writer of transitions over n steps, with a discount of rewards for each step."""
        return NStepWriter(self._new_stream(table), (batch_size, timeout_s), n, discount)

    def sample(
        self, batch_size: int, *, table: str = "main", timeout_s: float | None = None
    ) -> ReplayBatch:
        """Returns a batch of items; a ValueError if the table never allows so many at once."""
        return next(self.samples(batch_size, table=table, timeout_s=timeout_s, ahead=0))

    def samples(
        self,
        batch_size: int,
        *,
        table: str = "main",
        ahead: int = 1,
        timeout_s: float | None = None,
    ) -> Iterator[ReplayBatch]:
        """Yields batches until this node is to stop, and samples the next ones meanwhile.

        Batches that are `ahead` count as sampled. They do not see later inserts and priorities. More
        than one helps where the work on batches takes different times; each one needs memory.
        """
        self._known(table)
        check_number("batch_size", batch_size, 1)
        check_number("ahead", ahead, 0)
        return self._read(batch_size, table, ahead, timeout_s)

    def _read(
        self, batch_size: int, table: str, ahead: int, timeout_s: float | None
    ) -> Iterator[ReplayBatch]:
        #: With whose patience each was asked.
        asked: collections.deque[tuple[_Patience, Any]] = collections.deque()
        try:
            while True:
                patience = _Patience(table, self._who, timeout_s, secrets.randbits(62))

                def ask(patience: _Patience = patience) -> None:
                    call = self._node.futures.sample(patience.call(), batch_size)
                    asked.append((patience, call))

                found: Any = ""
                while isinstance(found, str):
                    while len(asked) <= ahead:
                        ask()
                    owner, call = asked.popleft()
                    found = patience.result(call.result, is_own=owner is patience)
                yield _batch(found)
                if _is_to_stop():
                    return
        finally:
            for _, call in asked:
                call.cancel()

    def update_priorities(self, keys: Any, priorities: Any, *, table: str = "main") -> int:
        """Changes the priorities of items; returns of how many, because others may be gone.

        `keys` are as in `ReplayBatch.keys`; there is one priority for each.
        """
        import numpy as np

        self._known(table)
        keys, priorities = np.asarray(keys, np.int64), np.asarray(priorities, np.float64)
        if keys.shape != priorities.shape or keys.ndim != 1:
            raise ValueError(f"keys have the shape {keys.shape}, priorities {priorities.shape}")
        changed: int = self._node.update_priorities(table, keys, priorities)
        return changed

    def info(self) -> dict[str, TableInfo]:
        """Returns by table how full it is, and who waits for what."""
        return cast("dict[str, TableInfo]", self._node.info())


class _StepWriter:
    """Gathers steps and items that refer to them, and sends each step once."""

    def __init__(self, stream: _ItemStream, options: tuple[int, float | None], least: int) -> None:
        self._batch_size, self._timeout_s = options
        for number in (least, self._batch_size):
            check_number("a number of a writer", number, 1)
        self._stream = stream
        self._items: list[tuple[Sequence[Any], Sequence[int], float]] = []
        #: Of steps, and of what items have of their own.
        self._structures: dict[str, dict[str, str]] = {}
        self._skeleton: Any = None
        #: By key, the steps that an item needs or may need, and which of them were sent.
        self._steps: dict[int, Sequence[Any]] = {}
        self._sent: set[int] = set()
        self._next_key = stream.key

    def _add_step(self, nest: Any, path: str) -> int:
        found = self._checked(nest, path)
        key, self._next_key = self._next_key, self._next_key + 1
        self._steps[key] = [leaf.copy() for leaf in found]
        return key

    def _checked(self, nest: Any, path: str) -> "Sequence[npt.NDArray[Any]]":
        found = _arrays(nest, path)
        structure = {where: described(leaf) for where, leaf in found.items()}
        known = self._structures.setdefault(path, structure)
        if known != structure:
            what = difference(known, structure)
            raise ItemError(f"this has another structure than what the writer had first: {what}")
        return list(found.values())

    def _add_item(self, own: Sequence[Any], keys: Sequence[int], priority: float) -> None:
        if not 0 <= priority < math.inf:
            raise ValueError(f"a priority is at least 0 and finite, not {priority!r}")
        # A number of another kind would need its package in the node.
        self._items.append((own, keys, float(priority)))

    def _flush_if_full(self) -> None:
        if len(self._items) >= self._batch_size:
            self.flush()

    def flush(self) -> None:
        """Sends the items that were not sent yet; what finds no room in time is lost."""
        import numpy as np

        if not self._items:
            return
        own, keys, priorities = zip(*self._items, strict=True)
        self._items = []
        needed = sorted({key for each in keys for key in each})

        of_items = np.array(keys, np.int64)

        def steps(everything: bool) -> tuple[Any, Any, Sequence[Any]]:
            chosen = [key for key in needed if everything or key not in self._sent]
            rows = zip(*[self._steps[key] for key in chosen], strict=True)
            return of_items, np.array(chosen, np.int64), [np.stack(each) for each in rows]

        structure = dict(itertools.chain(*(each.items() for each in self._structures.values())))
        structure["the number of steps"] = str(len(keys[0]))
        self._stream.send(
            (structure, courier.dumps(self._skeleton)),
            priorities,
            [np.stack(each) for each in zip(*own, strict=True)],
            self._timeout_s,
            steps,
        )
        self._sent.update(needed)
        self._forget(keys[-1][0])  # later items begin later

    def _flush_all(self) -> None:
        try:
            self.flush()
        finally:
            self._forget(self._next_key)

    def _forget(self, before: int) -> None:
        """Forgets steps that no item needs any more."""
        for key in [key for key in self._steps if key < before]:
            del self._steps[key]
            self._sent.discard(key)


class SequenceWriter(_StepWriter):
    """Writes items that are several steps in a row. For one thread.

    Items share their steps: each step is sent and kept once. An episode that is shorter than an
    item gives none.

    Example:
        writer = replay.sequence_writer(length=20, period=10)
        for observation, action, reward in episode:
            writer.append({"observation": observation, "action": action, "reward": reward})
        writer.end_episode()
    """

    def __init__(self, stream: Any, options: Any, length: int, period: int) -> None:
        """Makes one; `ReplayClient.sequence_writer` does that."""
        super().__init__(stream, options, min(length, period))
        self._length, self._period = length, period
        self._window: list[int] = []
        self._until_item = length

    def append(self, step: Any, priority: float = 1.0) -> None:
        """Appends a step, a nest of arrays, and inserts the item that it completes."""
        key = self._add_step(step, "item")
        self._skeleton = _numbered(step, 0), False
        self._window = [*self._window, key][-self._length :]
        self._until_item -= 1
        if not self._until_item:
            self._until_item = self._period
            self._add_item((), self._window, priority)
            self._flush_if_full()

    def end_episode(self, priority: float = 1.0) -> None:
        """Inserts the last steps of an episode if no item has them, and sends all."""
        if len(self._window) == self._length and self._until_item < self._period:
            self._add_item((), self._window, priority)
        self._window, self._until_item = [], self._length
        self._flush_all()


class NStepWriter(_StepWriter):
    """Writes transitions over n steps. For one thread.

    An item has "observation", "action", "reward" (the discounted sum), "discount" (of the value of
    the next observation; 0 if the episode has terminated before), and "next_observation". Items
    share observations: each is sent and kept once.

    Example:
        writer = replay.n_step_writer(3, discount=0.99)
        while not done:
            action = self.act(observation)
            next_observation, reward, done = env.step(action)
            writer.append(observation, action, reward)
            observation = next_observation
        writer.end_episode(observation)
    """

    def __init__(self, stream: Any, options: Any, n: int, discount: float) -> None:
        """Makes one; `ReplayClient.n_step_writer` does that."""
        super().__init__(stream, options, n)
        self._n, self._discount = n, discount
        self._window: collections.deque[tuple[int, Any, Any]] = collections.deque()
        self._nest: Any = None

    def append(self, observation: Any, action: Any, reward: Any, priority: float = 1.0) -> None:
        """Appends a step, and inserts the item that it completes: that of n steps ago.

        Args:
            observation: A nest of arrays; copied.
            action: What was done then; a nest as well.
            reward: What came of it: a number, or an array.
            priority: Of the item.
        """
        import numpy as np

        for what, nest in (("action", action), ("reward", reward)):
            _arrays(nest, f"item[{what!r}]")
        key = self._add_step(observation, _OBSERVATION)
        self._nest = rebuilt(observation, lambda _: 0)
        if len(self._window) == self._n:
            self._complete(key, 1.0, priority)
        self._window.append((key, rebuilt(action, np.array), np.array(reward)))
        self._flush_if_full()

    def end_episode(
        self, observation: Any, priority: float = 1.0, *, terminated: bool = True
    ) -> None:
        """Inserts the last items of an episode, which are over fewer steps, and sends all.

        Args:
            observation: After the last step.
            priority: Of the items.
            terminated: Whether nothing is of value afterwards; otherwise the episode was cut off.
        """
        key = self._add_step(observation, _OBSERVATION)
        while self._window:
            self._complete(key, 0.0 if terminated else 1.0, priority)
        self._flush_all()

    def _complete(self, end: int, value: float, priority: float) -> None:
        import numpy as np

        rewards = [
            reward * self._discount**index for index, (*_, reward) in enumerate(self._window)
        ]
        begin, action, _ = self._window.popleft()
        item = {
            "action": action,
            "discount": np.float32(value * self._discount ** len(rewards)),
            "reward": np.asarray(sum(rewards), np.float32),
        }
        own = self._checked(item, "item")
        steps = len(self._steps[begin])
        self._skeleton = (
            {
                **_numbered(item, 0),
                "observation": _numbered(self._nest, len(own)),
                "next_observation": _numbered(self._nest, len(own) + steps),
            },
            True,
        )
        self._add_item(own, (begin, end), priority)


class ReplayHandle(lp.CourierHandle[ReplayClient]):
    """A handle of a replay buffer: becomes a `ReplayClient` in a running node.

    Example:
        replay = program.add_node(rollouts.ReplayNode([table]), label="replay")
        program.add_node(lp.CourierNode(Actor, replay), label="actor")
    """

    def __init__(self, node: "ReplayNode") -> None:
        super().__init__(node)
        self._tables = node.tables

    def dereference(self) -> ReplayClient:
        """Returns a client; as `CourierHandle.dereference`."""
        return ReplayClient(super().dereference(), self._tables)


class ReplayNode(lp.CourierNode[ReplayClient]):
    """A replay buffer in numpy: tables of items that actors insert and learners sample.

    It serves until the program stops, and asks for the program's secret, as all nodes that can be
    called. With `checkpoints=`, its tables are saved and restored.

    Example:
        table = rollouts.Table("main", max_size=100_000, sampler="prioritized")
        replay = program.add_node(rollouts.ReplayNode([table]), label="replay")
        program.add_node(lp.CourierNode(Learner, replay), label="learner")  # gets a ReplayClient
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        """Describes the node.

        Args:
            tables: Its tables.

        Raises:
            ValueError: There is none, or two have the same name.
        """
        self.tables = [each.name for each in tables]
        if not tables or len(set(self.tables)) < len(tables):
            raise ValueError(f"ReplayNode takes tables with different names, not {self.tables}")
        super().__init__(cast("Any", ReplayServer), list(tables))

    def create_handle(self) -> ReplayHandle:
        """Returns a new handle to this node."""
        return ReplayHandle(self)


def _arrays(nest: Any, path: str) -> "dict[str, npt.NDArray[Any]]":
    """Returns the leaves by their places.

    Raises:
        ItemError: One is no array, or there is none.
    """
    import numpy as np

    found = {where: np.asarray(leaf) for where, leaf in leaves(nest, path)}
    for where, leaf in found.items():
        if leaf.dtype.hasobject:
            raise ItemError(f"{where} cannot be kept: items are made of arrays and numbers")
    if not found:
        raise ItemError(f"{path} has no arrays")
    return found


def _numbered(nest: Any, first: int) -> Any:
    numbers = itertools.count(first)
    return rebuilt(nest, lambda _: next(numbers))


def _batch(sampled: "SampledItems") -> ReplayBatch:
    """Returns a batch as users get it."""
    nest, splits = pickle.loads(sampled.skeleton)
    columns, steps = list(sampled.own), sampled.steps
    if splits:
        columns += [leaf[:, place] for place in (0, 1) for leaf in steps]
    else:
        columns += steps
    return ReplayBatch(rebuilt(nest, lambda number: columns[number]), *sampled[3:])
