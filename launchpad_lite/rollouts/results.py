"""What a trainer gets: batches, their groups and rollouts; and how far all is, and tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Rollout(Generic[R]):
    """One rollout.

    Attributes:
        value: What `generate` has returned; a list of what it has yielded, if rollouts have parts.
        version: The version of the weights that it was made with; of its oldest part.
        generator: Name of the node that has made it, or its end.
        took_s: Seconds that `generate` took.
        reward: What the reward has returned, if there are rewards.
        versions: The version of each part, or the one.

    Example:
        for rollout in group.rollouts:
            print(rollout.value, rollout.version, rollout.generator)
    """

    value: R
    version: int
    generator: str
    took_s: float
    reward: Any = None
    versions: Sequence[int] = ()


@dataclass(frozen=True)
class RolloutGroup(Generic[P, R]):
    """All rollouts of one prompt.

    Attributes:
        prompt: The prompt.
        index: Its place in the sequence of prompts.
        epoch: How often all prompts were used before.
        rollouts: `group_size` of them; fewer, but at least `min_group_size`, if some failed.
        staleness: Training steps between its beginning and this batch; at most `max_staleness`.

    Example:
        rewards = [reward for _, reward in group.values]
    """

    prompt: P
    index: int
    epoch: int
    rollouts: Sequence[Rollout[R]]
    staleness: int

    @property
    def values(self) -> list[R]:
        """The values of the rollouts."""
        return [each.value for each in self.rollouts]

    @property
    def rewards(self) -> list[Any]:
        """The rewards of the rollouts."""
        return [each.reward for each in self.rollouts]


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that was set aside, because its rollouts failed too often.

    Attributes:
        index: Its place in the sequence of prompts.
        epoch: How often all prompts were used before.
        errors: What happened, in order.

    Example:
        for failed in batch.set_aside:
            print(prompts[failed.index], failed.errors[-1])
    """

    index: int
    epoch: int
    errors: tuple[str, ...]


@dataclass(frozen=True)
class RolloutBatch(Generic[P, R]):
    """Groups to train with; iterable.

    Attributes:
        groups: As many as were asked for; the last batch may have fewer.
        step: The training step: how many steps have ended before.
        set_aside: Prompts that were given up since the last batch.

    Example:
        for batch in made.batches(groups=16):
            for group in batch:
                learn(group.prompt, group.values)
            made.publish(params)
    """

    groups: Sequence[RolloutGroup[P, R]]
    step: int
    set_aside: Sequence[FailedPrompt] = ()

    def __iter__(self) -> Iterator[RolloutGroup[P, R]]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class RolloutStatus:
    """How far the rollouts are, and who waits for whom.

    Attributes:
        step: Training steps that have ended.
        version: The newest version of the weights; 0 before the first.
        generators: Names of those that are there.
        waiting: Rollouts that no generator makes, and no reward judges, of prompts that were begun.
        running: Rollouts that generators make now, or rewards judge.
        complete: Groups that wait for a batch.
        trained: Groups that were trained.
        staleness: How many groups were handed out, by the steps between beginning and batch.
        retried: Rollouts that were begun again, for whatever reason.
        discarded: Groups that were thrown away because they were too old.
        late: Rollouts that came when they were not wanted any more.
        set_aside: Prompts that were given up; `RolloutBatch.set_aside` has their errors.
        waits: Who waits for what, for people; empty if the trainer does not wait.
        rollouts_per_s: Rollouts that were made in a second, in the last 30 s.
        size_per_s: Their size, such as tokens or steps, if `Rollouts` was told how to count it.
        steps_per_s: Training steps that ended in a second, in the same time.

    Example:
        print(made.status().waits)
    """

    step: int
    version: int
    generators: Sequence[str]
    waiting: int
    running: int
    complete: int
    trained: int
    staleness: Mapping[int, int] = field(default_factory=dict)
    retried: int = 0
    discarded: int = 0
    late: int = 0
    set_aside: int = 0
    waits: str = ""
    rollouts_per_s: float = 0.0
    size_per_s: float = 0.0
    steps_per_s: float = 0.0

    def __str__(self) -> str:
        size = f", size {self.size_per_s:,.1f}/s" if self.size_per_s else ""
        return (
            f"step {self.step:,}, {self.steps_per_s:,.1f}/s, version {self.version:,} of the weights; {len(self.generators)} generators\n"
            f"rollouts: {self.running} running, {self.waiting} waiting, {self.retried} again, {self.late} late; "
            f"{self.rollouts_per_s:,.1f}/s{size}\ngroups: {self.complete} complete, {self.trained} trained, "
            f"{self.discarded} too old, {self.set_aside} prompts set aside\n{self.waits}"
        ).rstrip()


@dataclass(frozen=True)
class TableInfo:
    """How full a table of a replay buffer is, and who waits.

    Attributes:
        size: Items that it has.
        max_size: How many it may have.
        steps: Steps that these items share; 0 if they have none.
        inserts: Items that were inserted, ever.
        samples: Items that were sampled, ever.
        waits: Calls that wait, for people: who, since when, and for what.

    Example:
        info = replay.info()["main"]
        print(info.size, info.samples / info.inserts, *info.waits)
    """

    size: int
    max_size: int
    steps: int
    inserts: int
    samples: int
    waits: Sequence[str]


#: What a trainer's checkpoint holds, to go on where its weights are from.
RolloutState = dict[str, Any]
