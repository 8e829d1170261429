"""One table of a replay buffer: which items it keeps, which are sampled, and who has to wait.

A state machine without I/O and without a clock: `now` is any clock that never goes back, in
seconds. Not thread-safe. It imports numpy: only running nodes load this module.

An item has arrays of its own, and refers to steps, which items share. Both are rows of large
arrays, one for each leaf, so that a batch is written and read with one copy for each leaf.
"""

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np  # noqa: TID253 - only the running node imports this module
import numpy.typing as npt  # noqa: TID253 - as above

from courier.lowlevel import allocate
from launchpad_lite.parts.nests import difference
from launchpad_lite.rollouts.errors import ItemError

if TYPE_CHECKING:
    from launchpad_lite.rollouts.replay import Table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Leaves = Sequence[npt.NDArray[Any]]

#: Bytes of an array for which there is room from the beginning.
_FIRST_BYTES = 1 << 30
#: Weights are so large at most, so that the sum of all is finite.
_MOST_WEIGHT = 1e200
#: Streams of items whose numbers are known, so that nothing is inserted twice.
_MOST_STREAMS = 10_000
#: Of rounding.
_EPSILON = 1e-9


class MissingStepsError(Exception):
    """Items refer to steps that the table no longer has: they are to be sent again."""


class InsertBatch(NamedTuple):
    """Items to insert, and the steps that they bring along."""

    stream: int  # sends its items one after the other
    first: int  # the number of the first item in the stream
    structure: dict[str, str]  # of an item, as `structure_of`
    skeleton: bytes  # what clients make items of; opaque here
    keys: Ints
    priorities: Floats
    own: Leaves  # of the items
    steps_of: Ints  # for each item, the keys of its steps
    step_keys: Ints
    steps: Leaves


class SentItems(NamedTuple):
    """An `InsertBatch` as clients send it: small arrays cost much of the time of a single insert."""

    stream: int
    first: int
    structure: dict[str, str]
    skeleton: bytes
    priorities: Sequence[float]
    own: Leaves
    #: As `steps_of`, `step_keys` and `steps` of an `InsertBatch`; None: the items have no steps.
    steps: tuple[Ints, Ints, Leaves] | None

    def batch(self) -> InsertBatch:
        count = len(self.priorities)
        keys = self.stream + self.first + np.arange(count, dtype=np.int64)
        steps = self.steps or (np.zeros((count, 0), np.int64), np.zeros(0, np.int64), ())
        return InsertBatch(*self[:4], keys, np.array(self.priorities, float), self.own, *steps)


class SampledItems(NamedTuple):
    """Items as the table hands them out."""

    skeleton: bytes
    own: Leaves
    steps: Leaves
    keys: Ints
    probabilities: Floats
    times_sampled: Ints
    priorities: Floats
    table_size: int


class TableState(NamedTuple):
    """A table. Of the leaves in `items`, it uses the rows `own_rows` and `step_rows`."""

    items: InsertBatch
    own_rows: Ints
    step_rows: Ints
    times_sampled: Ints
    next_of: dict[int, int]
    inserts: int
    samples: int
    lost: float


class SumTree:
    """Weights of places, one of which is found by its share in their sum. All for many at once."""

    def __init__(self, places: int) -> None:
        self._depth = max(0, places - 1).bit_length()
        self._first = 1 << self._depth
        self._sums = np.zeros(2 * self._first)

    @property
    def total(self) -> float:
        return float(self._sums[1])

    def set(self, places: Ints, weights: Floats | float) -> None:
        """Sets the weights of places; of a place that is named twice, the last one counts."""
        sums, nodes = self._sums, places + self._first
        sums[nodes] = weights
        if len(nodes) == 1:  # a tenth of the time
            node = int(nodes[0])
            while node := node >> 1:
                sums[node] = sums[2 * node] + sums[2 * node + 1]
            return
        for _ in range(self._depth):
            nodes >>= 1
            sums[nodes] = sums[2 * nodes] + sums[2 * nodes + 1]

    def get(self, places: Ints) -> Floats:
        return self._sums[places + self._first]

    def find(self, masses: Floats) -> Ints:
        """Returns the place at each mass between 0 and the total; never one without weight."""
        nodes = np.ones(len(masses), np.int64)
        for _ in range(self._depth):
            left = self._sums[2 * nodes]
            # The second condition decides only where rounding has left a mass too large.
            goes_right = (masses >= left) & (self._sums[2 * nodes + 1] > 0)
            masses = masses - np.where(goes_right, left, 0.0)
            nodes = 2 * nodes + goes_right
        return nodes - self._first


class RateLimiter:
    """How many items may be inserted and sampled now: the rules of Reverb's limiters."""

    def __init__(self, rules: "Table") -> None:
        self._rules = rules
        self.inserts = self.samples = 0
        #: Samples that items did not get before they were removed.
        self.lost = 0.0
        offset, buffer = (rules.samples_per_insert or 0) * rules.min_size, rules.error_buffer or 0
        #: Inserts * samples_per_insert - samples goes beyond them by less than one of each.
        self._least_ahead, self._most_ahead = offset - buffer, offset + buffer

    @property
    def largest_sample(self) -> float:
        """So many samples are allowed at once if all wait for them."""
        rules, most = self._rules, math.inf
        if rules.samples_per_insert is not None:
            least = max(self._least_ahead, 0) if rules.max_times_sampled else self._least_ahead
            most = math.floor(self._most_ahead - rules.samples_per_insert - least)
        return min(most, rules.max_size * (rules.max_times_sampled or math.inf))

    def insertable(self, size: int) -> float:
        """Returns how many items may be inserted where there are `size`."""
        rules = self._rules
        if rules.samples_per_insert is None:
            return math.inf
        gone = self.samples + self.lost
        most = (self._most_ahead + gone) / rules.samples_per_insert - self.inserts
        return max(rules.min_size - size, math.floor(most + _EPSILON))

    def sampleable(self, size: int) -> float:
        """Returns how many items may be sampled where there are `size`."""
        rules = self._rules
        if size < rules.min_size:
            return 0
        if rules.samples_per_insert is None:
            return math.inf
        ahead = self.inserts * rules.samples_per_insert - self.samples - self.lost
        return math.floor(ahead - self._least_ahead + _EPSILON)


class Rows:
    """Rows of arrays, one array for each leaf, which grow."""

    def __init__(self, like: Leaves, most: int) -> None:
        """Makes room for about `most` rows as those in `like`."""
        row_bytes = max([each[:1].nbytes for each in like], default=1)
        self._room = min(most, max(1024, _FIRST_BYTES // max(1, row_bytes)))
        self.arrays = [np.empty((self._room, *each.shape[1:]), each.dtype) for each in like]
        self._used = 0
        self._free: list[int] = []
        #: What was freed while rows are being saved; None if they are not.
        self._kept: list[int] | None = None

    def put(self, leaves: Leaves, count: int) -> Ints:
        """Writes rows; returns where they are."""
        fresh = max(0, count - len(self._free))
        rows = [self._free.pop() for _ in range(count - fresh)]
        rows += range(self._used, self._used + fresh)
        self._used += fresh
        if self._used > self._room:
            self._room = max(self._used, 2 * self._room)
            for index, old in enumerate(self.arrays):
                self.arrays[index] = np.empty((self._room, *old.shape[1:]), old.dtype)
                self.arrays[index][: len(old)] = old
        where = np.array(rows, np.int64)
        # Without rows, there may be no leaves.
        for array, leaf in zip(self.arrays, leaves, strict=count > 0):
            array[where] = leaf
        return where

    def free(self, rows: Ints) -> None:
        (self._free if self._kept is None else self._kept).extend(rows.tolist())

    def keep(self) -> Leaves:
        """Returns the arrays; no row of them that is in use now is written before `let_go`."""
        self._kept = self._kept or []
        return list(self.arrays)

    def let_go(self) -> None:
        self._free += self._kept or ()
        self._kept = None


def _taken(array: npt.NDArray[Any], rows: Ints) -> npt.NDArray[Any]:
    """Returns a copy of rows, in memory that is used again: fresh pages would double the time."""
    shape = (*rows.shape, *array.shape[1:])
    if not (size := math.prod(shape)):
        return array[rows]
    copy = np.frombuffer(allocate(size * array.itemsize), array.dtype).reshape(shape)
    return np.take(array, rows, axis=0, out=copy, mode="clip")  # without a buffer in between


class ReplayTable:
    """The items of one table, each in a slot."""

    def __init__(self, rules: "Table", seed: int | None = None) -> None:
        self._rules = rules
        self.limiter = RateLimiter(rules)
        self._random, size = np.random.default_rng(seed), rules.max_size
        #: By the kind of a sampler or remover that goes by weights: their exponent, and weights.
        self._weights = {
            kind: (exponent, SumTree(size))
            for kind, exponent in (("uniform", 0.0), ("prioritized", rules.priority_exponent))
            if kind in (rules.sampler, rules.remover)
        }
        exponent = max((each for each, _ in self._weights.values()), default=0.0)
        self._most_priority = _MOST_WEIGHT ** (1 / max(1.0, exponent))
        self._structure: dict[str, str] = {}
        self._skeleton = b""
        self._next_of: dict[int, int] = {}
        #: By key, the oldest first.
        self._slot_of: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._free = list(range(size - 1, -1, -1))
        # By slot. Zeros take no memory before they are written.
        self._keys, self._times_sampled, self._own_of, self._is_used = np.zeros((4, size), np.int64)
        self._priorities = np.zeros(size)
        self._left = np.zeros(size, np.int64)  # how often it may still be sampled
        self._steps_of = np.zeros((size, 0), np.int64)
        self._own, self._steps = Rows([], 0), Rows([], 0)
        self._row_of: dict[int, int] = {}
        # By row of a step: how many items refer to it.
        self._uses = self._step_keys = np.zeros(0, np.int64)
        self._inserted_at = self._sampled_at = -math.inf

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def steps(self) -> int:
        """How many steps there are, of all items."""
        return len(self._row_of)

    def insert(self, batch: InsertBatch, now: float) -> bool:
        """Inserts as many items as the limiter allows; returns whether none is left.

        Items that came before, with the same numbers in their stream, are skipped.
        """
        self._check(batch.priorities)
        if self._structure and batch.structure != self._structure:
            raise ItemError(
                f"table {self._rules.name!r}: an item has another structure than the first one: "
                + difference(self._structure, batch.structure)
            )
        done = max(0, self._next_of.get(batch.stream, 0) - batch.first)
        while done < len(batch.keys):
            allowed = min(self.limiter.insertable(len(self)), self._rules.max_size)
            count = min(int(allowed), len(batch.keys) - done)
            if count <= 0:
                return False
            self._put(batch, slice(done, done + count))
            done += count
            self._next_of.pop(batch.stream, None)  # the last one of the dict is the latest
            self._next_of[batch.stream] = batch.first + done
            if len(self._next_of) > _MOST_STREAMS:
                del self._next_of[next(iter(self._next_of))]
            self.limiter.inserts += count
            self._inserted_at = now
        return True

    def _put(self, batch: InsertBatch, part: slice) -> Ints:
        steps = self._use_steps(batch, part)
        keys, priorities = batch.keys[part], batch.priorities[part]
        while (surplus := len(self) + len(keys) - self._rules.max_size) > 0:
            removed = np.unique(self._choose(self._rules.remover, surplus, self._is_used)[0])
            if self._rules.max_times_sampled:  # the samples that they do not get are not waited for
                spi = self._rules.samples_per_insert or 0.0
                missing = np.maximum(0.0, spi - self._times_sampled[removed])
                self.limiter.lost += float(missing.sum())
            self._remove(removed)
        own = self._own.put([leaf[part] for leaf in batch.own], len(keys))
        slots = np.array([self._free.pop() for _ in keys], np.int64)
        self._slot_of.update(zip(keys.tolist(), slots.tolist(), strict=True))
        self._keys[slots] = keys
        self._times_sampled[slots] = 0
        self._own_of[slots] = own
        self._is_used[slots] = 1
        self._priorities[slots] = priorities
        self._left[slots] = self._rules.max_times_sampled or np.iinfo(np.int64).max
        self._steps_of[slots] = steps
        self._weigh(slots, priorities)
        return slots

    def _weigh(self, slots: Ints, priorities: Floats | None) -> None:
        """Sets the weights of items; None: they are not chosen."""
        for exponent, tree in self._weights.values():
            tree.set(slots, 0.0 if priorities is None else priorities**exponent)

    def _choose(self, kind: str, count: int, left: Ints) -> tuple[Ints, Floats]:
        """Returns slots of items and their probabilities; there may be fewer, or some too often.

        `left` says how often each slot may be chosen.
        """
        if kind not in self._weights:
            chosen: list[int] = []
            for slot in (reversed if kind == "lifo" else iter)(self._slot_of.values()):
                chosen += [slot] * min(int(left[slot]), count - len(chosen))
                if len(chosen) == count:
                    break
            return np.array(chosen, np.int64), np.ones(len(chosen))
        _, tree = self._weights[kind]
        if (total := tree.total) > 0:
            slots = tree.find(self._random.random(count) * total)
            return slots, tree.get(slots) / total
        slots = np.flatnonzero(left)  # all priorities are 0
        return self._random.choice(slots, count), np.full(count, 1 / len(slots))

    def _use_steps(self, batch: InsertBatch, part: slice) -> Ints:
        """Returns the rows of the steps of some items; stores those that are new."""
        needed = batch.steps_of[part]
        if not needed.size and self._structure:
            return needed
        fresh = [key for key in np.unique(needed).tolist() if key not in self._row_of]
        place_of = {key: place for place, key in enumerate(batch.step_keys.tolist())}
        if not place_of.keys() >= set(fresh):
            raise MissingStepsError
        if not self._structure:
            self._structure, self._skeleton = batch.structure, batch.skeleton
            size = self._rules.max_size
            self._own, self._steps = Rows(batch.own, size), Rows(batch.steps, size)
            self._steps_of = np.zeros((size, needed.shape[1]), np.int64)
        places = np.array([place_of[key] for key in fresh], np.int64)
        rows = self._steps.put([leaf[places] for leaf in batch.steps], len(fresh))
        if (more := rows.max(initial=-1) + 1 - len(self._uses)) > 0:
            more = max(more, len(self._uses), 1024)
            self._uses = np.pad(self._uses, (0, more))
            self._step_keys = np.pad(self._step_keys, (0, more))
        self._step_keys[rows] = fresh
        self._row_of.update(zip(fresh, rows.tolist(), strict=True))
        used = np.array([self._row_of[key] for key in needed.ravel().tolist()], np.int64)
        np.add.at(self._uses, used, 1)
        return used.reshape(needed.shape)

    def _remove(self, slots: Ints) -> None:
        self._weigh(slots, None)
        for key in self._keys[slots].tolist():
            del self._slot_of[key]
        self._left[slots] = self._is_used[slots] = 0
        self._own.free(self._own_of[slots])
        self._free += slots.tolist()
        steps = self._steps_of[slots].ravel()
        if not steps.size:
            return
        np.subtract.at(self._uses, steps, 1)
        unused = np.unique(steps[self._uses[steps] == 0])
        for key in self._step_keys[unused].tolist():
            del self._row_of[key]
        self._steps.free(unused)

    def sample(self, count: int, now: float) -> SampledItems | None:
        """Returns a batch; None as long as the limiter does not allow all of it."""
        most = self.limiter.largest_sample
        if count > most:
            raise ValueError(
                f"table {self._rules.name!r}: a batch of {count} never comes: the table allows "
                f"{most:g} samples at once at most. Give it a larger "
                "error_buffer, max_size or max_times_sampled"
            )
        if self._sampleable() < count:
            return None
        size, missing = len(self), count
        chosen, probabilities = [], []
        while missing:
            slots, odds = self._choose(self._rules.sampler, missing, self._left)
            if self._rules.max_times_sampled:
                # What was drawn too often is drawn again, as if the item had been removed at once.
                counts = np.array([self._use_up(slot) for slot in slots.tolist()], bool)
                slots, odds = slots[counts], odds[counts]
                self._weigh(slots[self._left[slots] == 0], None)
            np.add.at(self._times_sampled, slots, 1)
            chosen.append(slots)
            probabilities.append(odds)
            missing -= len(slots)
        slots = np.concatenate(chosen)
        sampled = SampledItems(
            self._skeleton,
            [_taken(array, self._own_of[slots]) for array in self._own.arrays],
            [_taken(array, self._steps_of[slots]) for array in self._steps.arrays],
            self._keys[slots],
            np.concatenate(probabilities),
            self._times_sampled[slots],
            self._priorities[slots],
            size,
        )
        self._remove(np.unique(slots[self._left[slots] == 0]))
        self.limiter.samples += count
        self._sampled_at = now
        return sampled

    def _use_up(self, slot: int) -> bool:
        """Takes one from how often an item may be sampled; returns whether there was one."""
        is_there = bool(self._left[slot])
        self._left[slot] -= is_there
        return is_there

    def _sampleable(self) -> float:
        allowed = self.limiter.sampleable(len(self))
        return min(allowed, int(self._left.sum())) if self._rules.max_times_sampled else allowed

    def update_priorities(self, keys: Ints, priorities: Floats) -> int:
        """Changes priorities; returns of how many items, because some may be gone."""
        self._check(priorities)
        slots = np.array([self._slot_of.get(key, -1) for key in keys.tolist()], np.int64)
        slots, priorities = slots[slots >= 0], priorities[slots >= 0]
        self._priorities[slots] = priorities
        self._weigh(slots, priorities)
        return len(slots)

    def why(self, what: str, count: int, now: float) -> str:
        """Returns why an "insert" or a "sample" of so many waits, for people."""
        rules, limiter, size = self._rules, self.limiter, len(self)
        other, at = "samples", self._sampled_at
        ratio = limiter.samples / max(1, limiter.inserts - rules.min_size + 1)
        why = (
            f"{float(rules.samples_per_insert or 0)} samples per insert wanted, {ratio:.1f} so far"
        )
        if what == "sample":
            other, at = "inserts", self._inserted_at
            allowed = limiter.sampleable(size)
            if size < rules.min_size:
                why = f"min_size={rules.min_size} items wanted, {size} so far"
            elif (left := self._sampleable()) < allowed:
                why = f"{count} samples wanted, and max_times_sampled leaves {left}"
            else:
                why += f"; {count} samples wanted, {max(0, allowed)} allowed now"
        since = "yet" if at == -math.inf else f"since {now - at:.0f} s"
        return f"table {rules.name!r}: {what} waits: {why}; nobody {other} {since}"

    def state(self) -> TableState:
        """Returns all that it has. The rows in use stay as they are until `let_go`."""
        slots = np.array(list(self._slot_of.values()), np.int64)
        steps = self._steps_of[slots]
        step_rows = np.flatnonzero(self._uses)
        items = InsertBatch(
            0,
            0,
            self._structure,
            self._skeleton,
            self._keys[slots],
            self._priorities[slots],
            self._own.keep(),
            self._step_keys[steps],
            self._step_keys[step_rows],
            self._steps.keep(),
        )
        counts = self.limiter.inserts, self.limiter.samples, self.limiter.lost
        times = self._times_sampled[slots]
        return TableState(
            items, self._own_of[slots], step_rows, times, dict(self._next_of), *counts
        )

    def let_go(self) -> None:
        self._own.let_go()
        self._steps.let_go()

    def restore(self, state: TableState) -> None:
        """Takes a state, whose leaves have only the rows in use; the newest items, if not all fit."""
        if state.items.structure:
            last = slice(max(0, len(state.items.keys) - self._rules.max_size), None)
            slots = self._put(state.items, last)
            self._times_sampled[slots] = state.times_sampled[last]
            self._left[slots] = np.maximum(1, self._left[slots] - state.times_sampled[last])
        self._next_of = state.next_of
        self.limiter.inserts, self.limiter.samples = state.inserts, state.samples
        self.limiter.lost = state.lost

    def _check(self, priorities: Floats) -> None:
        """Refuses priorities that are negative, or whose weight is too large for a sum."""
        # NaN is in no range.
        bad = priorities[~((priorities >= 0) & (priorities <= self._most_priority))]
        if len(bad):
            raise ValueError(
                f"a priority is at least 0 and at most {self._most_priority:g}; not {bad[0]}"
            )
