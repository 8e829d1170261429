"""Barriers: when a worker may begin its next step.

A barrier is a rule and nothing else: no I/O, no clock, no state. So the same object decides on a
server that knows all steps, in a peer that asks a few others, and in the simulator. `_population`
keeps the steps and the workers that wait.

The rules are those of Wang, Catterall and Mortier, "Probabilistic Synchronous Parallel"
(arXiv 1709.07772).
"""

import abc
import collections
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from launchpad_lite.parts.settings import check_number

M = TypeVar("M")

#: When a worker that waits draws another sample: never, as soon as one that holds it up has finished
#: a step, or each time that so many seconds have passed.
Resample = Literal["never", "on_progress"] | float


class Barrier(abc.ABC):
    """A rule that says when a worker may begin its next step. Subclass it to write your own.

    Attributes:
        sample_size: How many other workers a worker observes; None stands for all.
        resample: When a worker that waits draws another sample: `"never"` (it waits until the rule
            is true of the first one), `"on_progress"` (when one that holds it up has finished a
            step), or a number of seconds.

    Example:
        @dataclasses.dataclass(frozen=True)
        class Majority(engines.Barrier):
            sample_size = 9

            def may_advance(self, step, observed_steps):
                behind = sum(other < step for other in observed_steps)
                return 2 * behind <= len(observed_steps)
    """

    sample_size: int | None = None
    resample: Resample = "never"

    @abc.abstractmethod
    def may_advance(self, step: int, observed_steps: Sequence[int]) -> bool:
        """Returns whether a worker may begin its next step.

        Is not asked when there is no other to observe: the worker goes on then.

        Args:
            step: How many steps the worker has finished.
            observed_steps: How many the observed workers have finished, in any order; the worker is
                none of them.
        """

    def can_hold_up(self, step: int, other_step: int) -> bool:  # noqa: ARG002
        """Returns whether an observed worker can keep another one waiting, now or later.

        One that cannot is not observed any longer, which saves messages; `may_advance` is asked
        without it from then on. By default each can.

        Args:
            step: How many steps the waiting worker has finished.
            other_step: How many the observed one has.
        """
        return True

    def sample(self, others: Sequence[M], rng: random.Random) -> list[M]:
        """Returns the workers that one observes: all others, or some, drawn without replacement.

        Args:
            others: All other workers, in an order that does not depend on chance. With peers, also
                those that have left: no worker waits for these.
            rng: Where the random numbers come from.
        """
        if self.sample_size is None or self.sample_size >= len(others):
            return list(others)
        return rng.sample(others, self.sample_size)


class Steps(Sequence[int]):
    """How many steps each worker has finished: sorted, without names."""

    def __init__(self) -> None:
        self._count: collections.Counter[int] = collections.Counter()
        #: The lowest step; infinity if there is none.
        self.lowest = math.inf

    def add(self, step: int) -> None:
        """Adds the step of one worker."""
        self._count[step] += 1
        self.lowest = min(self.lowest, step)

    def remove(self, step: int) -> None:
        """Takes away the step of one worker."""
        self._count[step] -= 1
        if not self._count[step]:
            del self._count[step]
            if step == self.lowest:
                self.lowest = min(self._count, default=math.inf)

    def __len__(self) -> int:
        return self._count.total()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._count.elements()))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class _Lagging(Barrier):
    """No worker goes on that is more than `staleness` steps ahead of one that it observes."""

    staleness: float = 0

    def __post_init__(self) -> None:
        name, staleness = type(self).__name__, self.staleness
        if isinstance(staleness, bool) or not isinstance(staleness, int | float):
            raise TypeError(f"{name}: staleness is a number of steps, not {staleness!r}")
        if not staleness >= 0:
            raise ValueError(f"{name}: staleness is at least 0, not {staleness!r}")

    def may_advance(self, step: int, observed_steps: Sequence[int]) -> bool:
        """Returns whether all that are observed lag behind by few enough steps."""
        if isinstance(observed_steps, Steps):
            lowest = observed_steps.lowest
        else:
            lowest = min(observed_steps, default=math.inf)
        return step - lowest <= self.staleness

    def can_hold_up(self, step: int, other_step: int) -> bool:
        """Returns whether the other one lags behind too far; once it does not, it never will again."""
        return step - other_step > self.staleness


@dataclass(frozen=True)
class BSP(_Lagging):
    """Bulk synchronous parallel: no worker begins a step before all have finished the one before.

    Exact and slow: each step takes as long as its slowest worker.

    Example:
        engines.BSP().may_advance(3, [3, 4])  # True
    """


@dataclass(frozen=True)
class SSP(_Lagging):
    """Stale synchronous parallel: no worker is more than `staleness` steps ahead of the slowest.

    `SSP(0)` is `BSP()`, and `SSP(math.inf)` is `ASP()`.

    Example:
        engines.SSP(staleness=4).may_advance(7, [3, 9])  # True: 3 is 4 behind
    """

    staleness: float = field()  # without the default


@dataclass(frozen=True)
class ASP(Barrier):
    """Asynchronous parallel: no worker waits or observes others.

    Fast; updates may be computed from values of any age.

    Example:
        engines.ASP().may_advance(100, [0])  # True
    """

    sample_size: int | None = field(default=0, init=False, repr=False)

    def may_advance(self, step: int, observed_steps: Sequence[int]) -> bool:  # noqa: ARG002
        """Returns True."""
        return True


@dataclass(frozen=True)
class PSP(_Lagging):
    """Probabilistic synchronous parallel: BSP or SSP towards a random sample of the others.

    With `staleness=0` it is the paper's pBSP, above that its pSSP. No part has to know all steps, so
    it works without a server. `PSP(0)` is `ASP()`, and with a sample of all others it is
    `SSP(staleness)`.

    The paper does not say how a worker waits, which decides the speed. `resample="never"` keeps the
    sample until all of it have caught up: the strictest. `"on_progress"` draws another sample
    whenever one that holds it up has finished a step. A number draws another one after so many
    seconds, again and again.

    Attributes:
        sample_size: How many others a worker asks.
        staleness: How many steps these may lag behind.
        resample: See above.

    Example:
        barrier = engines.PSP(sample_size=10, staleness=4, resample=0.5)
    """

    sample_size: int = field()
    staleness: float = 0
    resample: Resample = "never"

    def __post_init__(self) -> None:
        check_number("PSP: sample_size", self.sample_size, 0)
        super().__post_init__()
        check_resample(self)


def check_resample(barrier: Barrier) -> None:
    """Raises what is wrong with the `resample` of a barrier: a TypeError or ValueError."""
    name, resample = type(barrier).__name__, barrier.resample
    expected = "resample is 'never', 'on_progress' or a number of seconds"
    if isinstance(resample, str):
        if resample not in ("never", "on_progress"):
            raise ValueError(f"{name}: {expected}, not {resample!r}")
    elif isinstance(resample, bool) or not isinstance(resample, int | float):
        raise TypeError(f"{name}: {expected}, not {resample!r}")
    elif not 0 < resample < math.inf:
        raise ValueError(f"{name}: {expected} above 0, not {resample!r}")


def check_barrier(barrier: object) -> None:
    """Raises what is wrong with something that is given as a barrier: a TypeError or ValueError."""
    if isinstance(barrier, type) and issubclass(barrier, Barrier):
        raise TypeError(f"barrier is an object, as {barrier.__name__}(...), not the class")
    if not isinstance(barrier, Barrier):
        raise TypeError(f"barrier is an engines.Barrier, as engines.BSP(), not {barrier!r}")
    check_resample(barrier)
