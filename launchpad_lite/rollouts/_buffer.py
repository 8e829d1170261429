"""The decisions of the buffer between generators and a trainer.

A state machine without I/O and without a clock: `now` is any clock that never goes back, in seconds.
Not thread-safe.

A prompt becomes a group of slots. A slot waits, is leased to a generator, and gets a rollout: the
first one counts, whatever comes doubled or late. Where there are rewards, the rollout is a draft
until it was leased to one of them as well. A complete group waits for a batch. A batch counts as
trained when the trainer publishes, or asks for the next one.

An environment is leased with a slot, and free again when the generator has let go of the attempt,
also of one that was given up, or is lost. Leases are numbered, so that an environment can refuse who
had it before. One that hangs is leased again in its next life.

**The bound.** A step ends when the trainer publishes after a batch; more publishes before the next
batch end no more steps. A group that begins in step b is in a batch of step b + max_staleness at the
latest. With "discard", older groups are thrown away, and their prompts begin again. With "pace",
nothing is thrown away, by two rules. First, at most max_staleness + 1 batches of groups have begun
and are not trained. Second, a batch takes the oldest complete groups, and waits for older ones if
those that it leaves would not all find room in the batches of the next steps in time.
"""

import collections
import heapq
import math
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from launchpad_lite.rollouts.errors import (
    GeneratorsGoneError,
    PromptsFailedError,
    TrainerReplacedError,
)
from launchpad_lite.rollouts.results import (
    FailedPrompt,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutState,
    RolloutStatus,
)

#: What nodes are for; labels of groups end with it.
GENERATOR, ENVIRONMENT, REWARD = "generator", "environment", "reward"

#: Seconds after which a node that was not heard from is lost.
_LEASE_S = 10.0
#: A node that was never heard from may take so many times as long as one that is lost.
_STARTS = 10
#: Prompts that fail one after the other, at least, before all are taken to fail.
_LEAST_FAILED = 3
#: Rates are those of so many seconds.
_RATE_S = 30.0
#: Open groups are so many times more if groups may be thrown away.
_AHEAD = 2


@dataclass(frozen=True)
class PromptRef:
    """One use of a prompt: the one with this index, after all were used `epoch` times."""

    epoch: int
    index: int


@dataclass
class PromptOrder:
    """Which prompts come next: those that begin again; then epoch by epoch, each shuffled by a seed."""

    #: How many prompts there are, and how often each is used; None: without end.
    count: int
    epochs: int | None
    shuffle: bool
    seed: int
    #: How many uses have begun.
    position: int = 0
    #: Prompts that begin again.
    again: collections.deque[PromptRef] = field(default_factory=collections.deque, init=False)
    _epoch: int = field(default=-1, init=False)
    _indices: Sequence[int] = field(default=(), init=False)

    @property
    def identity(self) -> str:
        """What has to be the same for a position to mean the same."""
        order = f"seed {self.seed}" if self.shuffle else "no shuffle"
        return f"{self.count} prompts, {order}"

    @property
    def is_over(self) -> bool:
        all_began = self.epochs is not None and self.position >= self.count * self.epochs
        return all_began and not self.again

    def next(self) -> PromptRef | None:
        """Returns the next one; None if none is left."""
        if self.is_over:
            return None
        if self.again:
            return self.again.popleft()
        epoch, place = divmod(self.position, self.count)
        if epoch != self._epoch:
            self._epoch, self._indices = epoch, range(self.count)
            if self.shuffle:
                self._indices = list(self._indices)
                random.Random(f"{self.seed} {epoch}").shuffle(self._indices)  # noqa: S311 - no secret
        self.position += 1
        return PromptRef(epoch, self._indices[place])


class MemberLife(NamedTuple):
    """One life of a generator, environment or reward: a node that starts again begins the next one."""

    name: str
    life: int
    role: str = GENERATOR


class RolloutOrder(NamedTuple):
    """One rollout to make."""

    token: str  # names this attempt
    prompt: PromptRef
    rollout: int  # its place in the group
    version: int  # the oldest version of the weights that will do
    environment: str = ""
    lease: int = 0  # of the environment: later ones have higher numbers, also of later buffers
    draft: Any = None  # the payload, for a reward
    parts: Sequence[Any] = ()  # payloads of those that were made before


#: A batch, whose values and rewards are payloads, and whose groups have no prompt; and what to restore
#: once it is trained. Without groups, all prompts were used.
HandedBatch = tuple[RolloutBatch[Any, Any], RolloutState]


class BufferRules(NamedTuple):
    """What the user has chosen; see `Rollouts`."""

    group_size: int
    min_group_size: int
    max_staleness: int
    discards: bool = False
    partial: bool = False
    rollout_timeout_s: float = math.inf
    reward_timeout_s: float = math.inf
    max_attempts: int = 3
    max_losses: int = 10
    absence_s: float = 60.0
    #: How many nodes there are of each role.
    members: Mapping[str, int] = {GENERATOR: 1}


@dataclass(slots=True, eq=False)
class _RolloutAttempt:
    """One node works at a slot; it has the slot's lease until it is given up."""

    token: str
    slot: "_Slot"
    holder: str
    begun_at: float
    deadline_at: float
    environment: str
    #: Parts that were made before.
    parts: int
    #: What the holder does for it now, for people.
    doing: str = ""

    @property
    def is_open(self) -> bool:
        return self.slot.lease is self


@dataclass(slots=True, eq=False)
class _Slot:
    group: "_OpenGroup"
    place: int
    lease: _RolloutAttempt | None = None
    #: Payloads of the parts that were made, and their versions.
    parts: list[tuple[Any, int]] = field(default_factory=list)
    #: A rollout that waits for its reward.
    draft: Rollout[Any] | None = None
    made: Rollout[Any] | None = None
    errors: list[str] = field(default_factory=list)
    losses: int = 0
    #: The nodes that have failed or were too slow: others are to try.
    failed_at: set[str] = field(default_factory=set)
    is_dropped: bool = False

    @property
    def is_settled(self) -> bool:
        return self.made is not None or self.is_dropped

    @property
    def wants(self) -> str:
        """The role that is to work at it; empty if none is."""
        if self.lease is not None or self.is_settled:
            return ""
        return GENERATOR if self.draft is None else REWARD


@dataclass(slots=True, eq=False)
class _OpenGroup:
    number: int
    prompt: PromptRef
    #: The step in which it began.
    begun: int
    slots: list[_Slot] = field(default_factory=list)

    @property
    def made(self) -> list[Rollout[Any]]:
        return [slot.made for slot in self.slots if slot.made is not None]


@dataclass(slots=True, eq=False)
class _RolloutMember:
    life: MemberLife
    seen_at: float
    #: How many attempts it works at, at the same time.
    threads: int = 1
    #: The attempts that it works at, also those that were given up, and since when.
    held: dict[str, float] = field(default_factory=dict)
    #: Of an environment: since when it hangs.
    hung_at: float = math.inf


class RolloutBuffer:
    """The prompts, groups and leases of one buffer."""

    def __init__(self, rules: BufferRules, prompts: PromptOrder, leases: int = 0) -> None:
        """Makes one in which nothing has begun; its leases of environments are numbered from there."""
        self._rules = rules
        self._leased = leases
        self._limits_s = {GENERATOR: rules.rollout_timeout_s, REWARD: rules.reward_timeout_s}
        self._prompts = prompts
        #: By number, the oldest first.
        self._groups: dict[int, _OpenGroup] = {}
        self._number = 0
        #: Numbers of those that wait for a batch.
        self._complete: set[int] = set()
        #: By role, slots that may be free, by group and place: heaps.
        self._free: dict[str, list[tuple[int, int]]] = {GENERATOR: [], REWARD: []}
        #: Attempts by token, also those that were given up, while their group is here.
        self._attempts: dict[str, _RolloutAttempt] = {}
        self._members: dict[str, _RolloutMember] = {}
        #: The newest life of each node, also of those that are gone.
        self._lives: dict[str, int] = {}
        #: By token, who works at an attempt, also at one that was given up, and its environment.
        self._works: dict[str, tuple[_RolloutMember, _RolloutMember | None]] = {}
        #: Environments that no attempt has.
        self._idle: list[_RolloutMember] = []
        #: By role, since when no node is there, and for how long that may be.
        self._absent_at: dict[str, float] = {}
        self._absence_s = dict.fromkeys(rules.members, _STARTS * rules.absence_s)  # until the first
        self._ticked_at = math.inf
        #: The trainer that reads, how many groups its batches have, and its last batch.
        self.session = ""
        self._batch_groups = 1
        self._batch_number = -1
        self._batch: HandedBatch | None = None
        #: The groups of this batch, until it is trained.
        self._handed: list[_OpenGroup] = []
        self._waits_since: float | None = None
        self._step = 0
        self._version = 0
        #: Whether a batch was handed out in this step.
        self._has_batch = False
        self._trained = self._retried = self._discarded = self._late = self._set_aside = 0
        self._staleness: collections.Counter[int] = collections.Counter()
        #: How many rollouts were made, and their size; what they and the step were at past ticks.
        self._made, self._size = 0, 0.0
        self._past: collections.deque[tuple[float, int, float, int]] = collections.deque()
        self._failed: list[FailedPrompt] = []
        self._failed_in_row = 0
        self._last_error = ""

    # Called for generators, environments and rewards.

    def note(
        self,
        member: MemberLife,
        now: float,
        held: Mapping[str, str] | None = None,
        threads: int = 1,
    ) -> bool:
        """Hears from a node; returns whether it hangs, and is to start again.

        `held` says what it does for each of its attempts, for people; None: it does not say. Then it
        does not say either how many attempts it works at, at the same time. With 0 `threads`, it is
        not there (yet): only its life before is over.
        """
        if member.life < self._lives.get(member.name, 0):
            return False  # it was on its way when the node ended
        self._lives[member.name] = member.life
        known = self._members.get(member.name)
        if known is not None and known.life != member:
            self._lose(member.name, "has ended")
            known = None
        if not threads:
            return False
        if known is None:
            known = self._members[member.name] = _RolloutMember(member, now)
            if member.role == ENVIRONMENT:
                self._idle.append(known)
        known.seen_at = now
        self._absent_at.pop(member.role, None)
        self._absence_s[member.role] = self._rules.absence_s
        if held is None:
            return False
        known.threads = threads
        # Those of this node alone: each one says this each second.
        for token, since in list(known.held.items()):
            if token not in held and since + _LEASE_S / 2 <= now:
                self._let_go(token)
                attempt = self._attempts.get(token)
                if attempt is not None and attempt.is_open:  # the answer with it was lost
                    self._free_again(attempt.slot)
        for token, doing in held.items():
            known.held.setdefault(token, now)
            self._works.setdefault(token, (known, None))
            if token in self._attempts:
                self._attempts[token].doing = doing
        if member.role == REWARD:
            limit_s = self._limits_s[REWARD]
            return any(now - known.held[token] >= limit_s for token in held)
        return known.hung_at <= now

    def take(self, member: MemberLife, now: float) -> RolloutOrder | None:
        """Leases the next rollout to a generator or a reward; None if there is none now."""
        self.note(member, now)
        known = self._members.get(member.name)
        if not self._version or known is None or known.life != member:
            return None  # there are no weights yet; or the node has ended
        makes = member.role == GENERATOR
        if makes and not self._has_environment():
            return None
        slot = self._free_slot(member, now)
        if slot is None and makes and self._begin_group():
            slot = self._free_slot(member, now)
        if slot is None:
            return None
        token, environment, its_name = secrets.token_hex(8), None, ""
        if makes and self._idle:
            environment = self._idle.pop(0)
            its_name = environment.life.name
            self._leased += 1
        self._works[token] = known, environment
        known.held[token] = now
        deadline_at = now + self._limits_s[member.role]
        slot.lease = self._attempts[token] = _RolloutAttempt(
            token, slot, member.name, now, deadline_at, its_name, len(slot.parts)
        )
        parts = [payload for payload, _ in slot.parts]
        more = its_name, self._leased, slot.draft and slot.draft.value, parts
        return RolloutOrder(token, slot.group.prompt, slot.place, self._version, *more)

    def has_work(self, role: str) -> bool:
        """Returns whether a slot is free after a `take` without success: others may have it."""
        return bool(self._free[role]) and (role == REWARD or self._has_environment())

    def _has_environment(self) -> bool:
        """Returns whether one is free for a rollout, or rollouts need none."""
        return bool(self._idle) or ENVIRONMENT not in self._rules.members

    def add(self, token: str, number: int, payload: Any, version: int) -> int:
        """Takes a part of a rollout; returns the version that the next one needs, 0 if none is wanted.

        The number of the part in the rollout tells whether it has come before.
        """
        attempt = self._attempts.get(token)
        if attempt is None or not attempt.is_open:
            return 0
        if number == len(attempt.slot.parts):
            attempt.slot.parts.append((payload, version))
        return self._version

    def give(self, token: str, made: Rollout[Any], size: float = 0.0) -> bool:
        """Takes a rollout from a generator, of a size as users count; returns whether it is used."""
        attempt = self._end(token)
        if (
            attempt is None
            or attempt.slot.is_settled
            or attempt.slot.draft is not None
            or (self._rules.partial and not attempt.is_open)  # its parts may be others'
        ):
            self._late += 1
            return False
        slot = attempt.slot
        slot.lease = None
        self._made += 1
        self._size += size
        if slot.parts:
            payloads, versions = map(list, zip(*slot.parts, strict=True))
            made = replace(made, value=payloads, version=min(versions), versions=versions)
            slot.parts = []
        if REWARD in self._rules.members:
            slot.draft = made
            self._push(slot)
        else:
            self._settle(slot, made)
        return True

    def score(self, token: str, reward: Any) -> None:
        """Takes the reward of a rollout."""
        attempt = self._end(token)
        if attempt is None or attempt.slot.is_settled or attempt.slot.draft is None:
            self._late += 1
        else:
            self._settle(attempt.slot, replace(attempt.slot.draft, reward=reward))

    def _settle(self, slot: _Slot, made: Rollout[Any]) -> None:
        slot.made, slot.draft, slot.lease = made, None, None
        self._complete_if_so(slot.group)

    def _complete_if_so(self, group: _OpenGroup) -> None:
        if all(slot.is_settled for slot in group.slots):
            self._complete.add(group.number)
            self._failed_in_row = 0

    def fail(self, token: str, error: str, now: float, fault: str = "") -> str:
        """Hears that work at a rollout has raised; returns the environment that hangs, if one does.

        The fault: "hangs", the environment does not answer; "lost", a node that it has called is gone.
        """
        hangs, (_, environment) = "", self._works.get(token, (None, None))
        if fault == "hangs" and environment is not None:
            hangs, environment.hung_at = environment.life.name, now
        attempt = self._end(token)
        if attempt is not None and attempt.is_open:
            if fault == "lost":
                self._lose_rollout(attempt.slot, error)
            else:
                holder = attempt.holder
                self._retry(attempt.slot, hangs or holder, f"{holder}: {error}")
        return hangs

    def _end(self, token: str) -> _RolloutAttempt | None:
        """Forgets an attempt at which its holder works no more; returns it, if its group is here."""
        self._let_go(token)
        return self._attempts.pop(token, None)

    def _let_go(self, token: str) -> None:
        holder, environment = self._works.pop(token, (None, None))
        if holder is not None:
            del holder.held[token]
        if environment is not None and environment.hung_at == math.inf:
            if self._members.get(environment.life.name) is environment:
                self._idle.append(environment)

    def _free_slot(self, member: MemberLife, now: float) -> _Slot | None:
        """Takes the first free slot of the oldest group; not one that others are to try."""
        passed = []
        found = None
        heap = self._free[member.role]
        while heap and found is None:
            number, place = heapq.heappop(heap)
            group = self._groups.get(number)
            if group is None or group.slots[place].wants != member.role:
                continue
            slot = group.slots[place]
            if member.name in slot.failed_at and any(
                each.life.name not in slot.failed_at and not self._is_stuck(each, now)
                for each in self._of(member.role)
            ):
                passed.append(slot)
            else:
                found = slot
        for slot in passed:
            self._push(slot)
        return found

    def _of(self, role: str) -> list[_RolloutMember]:
        return [each for each in self._members.values() if each.life.role == role]

    def _is_stuck(self, member: _RolloutMember, now: float) -> bool:
        """Returns whether it will not go on: for too long, all its threads work at one attempt."""
        if member.life.role == ENVIRONMENT:
            return now - member.hung_at >= self._rules.absence_s
        limit_s = self._limits_s[member.life.role] + self._rules.absence_s
        return sum(now - since >= limit_s for since in member.held.values()) >= member.threads

    def _begin_group(self) -> bool:
        """Begins the group of the next prompt; returns whether there may be one more."""
        batches = (self._rules.max_staleness + 1) * (_AHEAD if self._rules.discards else 1)
        is_full = len(self._groups) + len(self._handed) >= batches * self._batch_groups
        if is_full or self._all_fail or (prompt := self._prompts.next()) is None:
            return False
        group = self._groups[self._number] = _OpenGroup(self._number, prompt, self._step)
        group.slots = [_Slot(group, place) for place in range(self._rules.group_size)]
        for slot in group.slots:
            self._push(slot)
        self._number += 1
        return True

    # What becomes of attempts.

    def _retry(self, slot: _Slot, failed_at: str, error: str) -> None:
        """Frees a slot whose attempt has failed; gives it up, or its prompt, if that was too often."""
        slot.errors.append(error)
        slot.failed_at.add(failed_at)
        if len(slot.errors) < self._rules.max_attempts:
            self._free_again(slot)
        else:
            self._give_up(slot)

    def _free_again(self, slot: _Slot) -> None:
        slot.lease = None
        self._retried += 1
        self._push(slot)

    def _push(self, slot: _Slot) -> None:
        heapq.heappush(self._free[slot.wants], (slot.group.number, slot.place))

    def _give_up(self, slot: _Slot) -> None:
        group = slot.group
        if sum(not each.is_dropped for each in group.slots) > self._rules.min_group_size:
            self._drop(slot)
            return
        errors = tuple(error for each in group.slots for error in each.errors)
        self._failed.append(FailedPrompt(group.prompt.index, group.prompt.epoch, errors))
        self._set_aside += 1
        self._failed_in_row += 1
        self._last_error = errors[-1]
        self._remove(group)

    def _drop(self, slot: _Slot) -> None:
        slot.is_dropped, slot.lease = True, None
        self._complete_if_so(slot.group)

    def _lose(self, name: str, why: str) -> None:
        """Forgets a node; its rollouts are made again."""
        member = self._members.pop(name)
        for token in list(member.held):
            self._let_go(token)
        self._idle = [each for each in self._idle if each is not member]
        for attempt in self._open_attempts():
            if name in (attempt.holder, attempt.environment):
                self._lose_rollout(attempt.slot, f"{name} {why}")
            if name == attempt.environment:
                self._attempts.pop(attempt.token, None)  # what comes of it is worth nothing

    def _lose_rollout(self, slot: _Slot, why: str) -> None:
        slot.losses += 1
        if slot.losses <= self._rules.max_losses:
            self._free_again(slot)
        else:
            slot.errors.append(f"it has lost {slot.losses} nodes: {why}")
            self._give_up(slot)

    def _open_attempts(self) -> Iterator[_RolloutAttempt]:
        """Yields those that were not given up; the reader may end them, and others."""
        for token, attempt in list(self._attempts.items()):
            if token in self._attempts and attempt.is_open:
                yield attempt

    def _remove(self, group: _OpenGroup) -> None:
        del self._groups[group.number]
        self._complete.discard(group.number)
        self._attempts = {t: a for t, a in self._attempts.items() if a.slot.group is not group}

    def tick(self, now: float) -> None:
        """Notices silent generators and rollouts that take too long; call it each second."""
        self._past.append((now, self._made, self._size, self._step))
        while self._past[0][0] < now - _RATE_S:
            self._past.popleft()
        # If this process stood still, it could hear nothing.
        if now - self._ticked_at > _LEASE_S / 2:
            for member in self._members.values():
                member.seen_at = now
        self._ticked_at = now
        for name, member in list(self._members.items()):
            if member.seen_at + _LEASE_S <= now:
                self._lose(name, f"was not heard from for {_LEASE_S:g} s")
        for role in self._rules.members:
            if not self._of(role):
                self._absent_at.setdefault(role, now)
        for attempt in self._open_attempts():
            if attempt.deadline_at <= now:
                self._time_out(attempt)

    def _time_out(self, attempt: _RolloutAttempt) -> None:
        slot = attempt.slot
        limit = f"rollout_timeout_s={self._limits_s[GENERATOR]:g}"
        if slot.draft is not None:
            limit = f"reward_timeout_s={self._limits_s[REWARD]:g}"
        doing = f"; it {attempt.doing}" if attempt.doing else ""
        error = f"{attempt.holder}: it took longer than {limit}{doing}"
        if len(slot.group.made) >= self._rules.min_group_size:
            slot.errors.append(error)
            self._drop(slot)
        elif len(slot.parts) > attempt.parts:  # it is only long
            self._free_again(slot)
        else:
            self._retry(slot, attempt.holder, error)

    # Called for the trainer.

    def begin(
        self, session: str, groups: int, version: int, state: RolloutState | None
    ) -> RolloutState:
        """A trainer begins to read, perhaps again: from a state, or where the last one has stopped.

        With a state, all that has begun is thrown away, and the prompts that were not trained then
        begin again. Returns the state in which it begins.
        """
        if state is not None and state.get("order") != self._prompts.identity:
            raise ValueError(
                f"the state is of {state.get('order')}; these are {self._prompts.identity}"
            )
        self._batch_groups, self._version = groups, version
        self._waits_since, self._failed_in_row = None, 0
        if session == self.session:
            self._end_batch()
            self._discard()
            return self._state_after()
        self.session = session
        self._batch_number, self._batch = -1, None
        if state is None:
            for group in self._handed:  # nobody knows whether it was trained
                self._groups[group.number] = group
                self._complete.add(group.number)
            self._groups = dict(sorted(self._groups.items()))
        else:
            for group in list(self._groups.values()):
                self._remove(group)
            self._prompts.position = state["position"]
            self._prompts.again = collections.deque(PromptRef(*each) for each in state["again"])
            self._step, self._trained = state["step"], state["trained"]
            self._failed = []  # they are tried again
            self._past.clear()  # its steps were none of these
        self._handed, self._has_batch = [], False
        self._discard()  # batches may be smaller than those of the last trainer
        return self._state_after()

    def published(self, session: str, version: int) -> None:
        """The trainer of a session has published weights; its last batch is trained."""
        self._version = version
        if session != self.session:
            return  # a new trainer, before it begins
        self._end_batch()
        if self._has_batch:
            self._has_batch = False
            self._step += 1
            # With "pace", there is something only if the trainer publishes while it waits for a batch.
            self._discard()

    def _end_batch(self) -> None:
        self._trained += len(self._handed)
        self._handed = []

    def _discard(self) -> None:
        for group in self._too_old(list(self._groups.values()), self._step):
            self._discarded += 1
            self._prompts.again.append(group.prompt)
            self._remove(group)

    def _too_old(self, groups: Sequence[_OpenGroup], step: int) -> list[_OpenGroup]:
        """Returns those that find no room in time, if the first of them are in the batch of a step.

        With "discard", only those that are too old by then: others may be, later.
        """
        size = len(groups) if self._rules.discards else self._batch_groups
        return [
            group
            for place, group in enumerate(groups)
            if group.begun + self._rules.max_staleness < step + place // size
        ]

    def hand_out(self, session: str, number: int, now: float) -> HandedBatch | None:
        """Returns a batch of a session, by its number from 0; None if it is not complete yet.

        The batch before counts as trained; the same one may be asked for again.
        """
        if session != self.session:
            raise TrainerReplacedError(
                "another trainer has begun to read batches of these rollouts"
            )
        if number == self._batch_number:
            return self._batch
        self._end_batch()
        waits_since, self._waits_since = self._waits_since, None
        found = self._next_groups()
        if found is None:
            self._check_hope(now)
            self._waits_since = now if waits_since is None else waits_since
            return None
        if not found and not self._trained and self._failed:
            raise self._all_failed()
        groups: list[RolloutGroup[Any, Any]] = []
        for group in found:
            staleness, ref = self._step - group.begun, group.prompt
            groups.append(RolloutGroup(None, ref.index, ref.epoch, group.made, staleness))
            self._staleness[staleness] += 1
            self._remove(group)
        self._has_batch = bool(found) or self._has_batch
        self._handed = found
        failed, self._failed = self._failed, []
        self._batch = RolloutBatch(groups, self._step, failed), self._state_after()
        self._batch_number = number
        return self._batch

    def _state_after(self) -> RolloutState:
        """Returns the state once all that was handed out is trained, and published."""
        again = *(group.prompt for group in self._groups.values()), *self._prompts.again
        return {
            "order": self._prompts.identity,
            "position": self._prompts.position,
            "again": [(each.epoch, each.index) for each in again],
            "step": self._step + self._has_batch,
            "trained": self._trained + len(self._handed),
        }

    def _next_groups(self) -> list[_OpenGroup] | None:
        """Returns the groups of the next batch; none at the end; None if they are not complete."""
        size = self._batch_groups
        if self._prompts.is_over:
            size = min(size, len(self._groups))
        if len(self._complete) < size:
            return None
        numbers = sorted(self._complete)[:size]
        taken = set(numbers)
        rest = [group for number, group in self._groups.items() if number not in taken]
        if not self._rules.discards and self._too_old(rest, self._step + 1):
            return None
        return [self._groups[number] for number in numbers]

    # Who waits for what.

    def _check_hope(self, now: float) -> None:
        """Raises if nothing will come, however long the trainer waits."""
        if self._all_fail:
            raise self._all_failed()
        if self._prompts.is_over and not self._unmade():
            return
        for role, most_s in self._absence_s.items():
            absent_s = now - self._absent_at.get(role, math.inf)
            if absent_s >= most_s:
                raise GeneratorsGoneError(
                    f"no {role} is there: none was heard from for {absent_s:.0f} s; "
                    f"{self._waiting_for(now)}"
                )
            members = self._of(role)
            if members and all(self._is_stuck(each, now) for each in members):
                names = ", ".join(sorted(each.life.name for each in members))
                raise GeneratorsGoneError(
                    f"no {role} goes on: {names} all work at one rollout for too long (its limit, and "
                    f"absence_s={self._rules.absence_s:g}); {self._waiting_for(now)}"
                )

    @property
    def _all_fail(self) -> bool:
        return self._failed_in_row >= max(_LEAST_FAILED, self._batch_groups)

    def _all_failed(self) -> PromptsFailedError:
        return PromptsFailedError(
            f"{self._failed_in_row} prompts, one after the other, were given up; the last error: "
            f"{self._last_error}"
        )

    def _unmade(self) -> int:
        return sum(not slot.is_settled for group in self._groups.values() for slot in group.slots)

    def _first_incomplete(self) -> _OpenGroup | None:
        return next((each for n, each in self._groups.items() if n not in self._complete), None)

    def _waiting_for(self, now: float) -> str:
        """Returns for which rollouts the trainer waits, and who makes them, for people."""
        for role, count in self._rules.members.items():
            if not self._of(role):
                return f"none of {count} {role}s is there"
        if (group := self._first_incomplete()) is None:
            busy = [name for name, each in self._members.items() if each.held]
            late = f": {', '.join(sorted(busy))} still work at what is not wanted" if busy else ""
            return f"no prompt has begun yet{late}"
        wanted = sum(not slot.is_dropped for slot in group.slots)
        parts = []
        for slot in group.slots:
            what = f"rollout {slot.place}"
            if (lease := slot.lease) is not None:
                doing = f", which {lease.doing}" if lease.doing else ""
                for_s = now - lease.begun_at
                parts.append(f"{what} has been at {lease.holder} for {for_s:.0f} s{doing}")
            elif not slot.is_settled:
                count, most = len(slot.errors), self._rules.max_attempts
                tried = f" (failed {count} of {most} times)" if count else ""
                role = slot.wants
                if role == GENERATOR and not self._has_environment():
                    role = ENVIRONMENT
                parts.append(f"{what} waits for a free {role}{tried}")
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        return f"prompt {group.prompt.index}: {len(group.made)} of {wanted}; {'; '.join(parts[:3])}{more}"

    def waits(self, now: float) -> str:
        """Returns how long the trainer waits and for whom; empty if it does not wait."""
        if self._waits_since is None:
            return ""
        return f"the trainer has waited {now - self._waits_since:.0f} s: {self._waiting_for(now)}"

    def waits_for(self, now: float) -> list[tuple[str, str]]:
        """Returns for which nodes the trainer waits, and why; "": for none that is known."""
        if not (why := self.waits(now)):
            return []
        group = self._first_incomplete()
        leases = [slot.lease for slot in group.slots] if group else []
        return [(each.holder, why) for each in leases if each is not None] or [("", why)]

    def status(self, now: float) -> RolloutStatus:
        """Returns how far all is."""
        slots = [slot for group in self._groups.values() for slot in group.slots]
        running = sum(slot.lease is not None for slot in slots)
        return RolloutStatus(
            self._step,
            self._version,
            sorted(each.life.name for each in self._of(GENERATOR)),
            self._unmade() - running,
            running,
            len(self._complete),
            self._trained,
            dict(sorted(self._staleness.items())),
            self._retried,
            self._discarded,
            self._late,
            self._set_aside,
            self.waits(now),
            *self._rates(now),
        )

    def _rates(self, now: float) -> tuple[float, ...]:
        """Returns how many rollouts are made in a second, their size, and how many steps."""
        counts = self._made, self._size, self._step
        began_at, *before = self._past[0] if self._past else (now, *counts)
        seconds = max(now - began_at, 1.0)
        pairs = zip(counts, before, strict=True)
        return tuple((new - old) / seconds for new, old in pairs)
