"""What the buffer decides, in any order of messages, losses, doubles and jumps of the clock."""

import asyncio
import collections
import os
import random
from typing import Any

import pytest

from launchpad_lite.rollouts import _buffer_node
from launchpad_lite.rollouts._buffer import (
    ENVIRONMENT,
    GENERATOR,
    REWARD,
    BufferRules,
    MemberLife,
    PromptOrder,
    PromptRef,
    RolloutBuffer,
    RolloutOrder,
)
from launchpad_lite.rollouts._buffer_node import BufferNode
from launchpad_lite.rollouts.errors import (
    GeneratorsGoneError,
    PromptsFailedError,
    TrainerReplacedError,
)
from launchpad_lite.rollouts.results import Rollout

#: How many orders are tried: more with LAUNCHPAD_SEEDS.
_SEEDS = int(os.environ.get("LAUNCHPAD_SEEDS", "200"))


def made(order: RolloutOrder, generator: str = "g") -> Rollout[Any]:
    value, version = (order.prompt, order.rollout), order.version
    return Rollout(value, version, generator, 0.1, versions=[version])


class _Desk:
    """A buffer with a clock, a trainer, and short ways to ask it."""

    def __init__(
        self, count: int, groups: int = 1, epochs: int = 1, leases: int = 0, **rules: Any
    ) -> None:
        chosen = {"group_size": 1, "min_group_size": rules.get("group_size", 1), "max_staleness": 1}
        order = PromptOrder(count, epochs=epochs, shuffle=False, seed=0)
        self.buffer = RolloutBuffer(BufferRules(**{**chosen, **rules}), order, leases)
        self.now = 100.0
        self.number = 0
        self.buffer.begin("trainer", groups, 1, None)

    def take(self, name: str = "g", role: str = GENERATOR, life: int = 1) -> RolloutOrder | None:
        return self.buffer.take(MemberLife(name, life, role), self.now)

    def make(self, generator: str = "g") -> RolloutOrder:
        order = self.take(generator)
        assert order is not None
        assert self.buffer.give(order.token, made(order))
        return order

    def hand_out(self) -> Any:
        handed = self.buffer.hand_out("trainer", self.number, self.now)
        self.number += handed is not None
        return None if handed is None else handed[0]

    def prompts(self) -> list[int] | None:
        batch = self.hand_out()
        return None if batch is None else [each.index for each in batch.groups]

    def beat(self, generator: str, *held: str) -> None:
        life = MemberLife(generator, 1)
        self.buffer.note(life, self.now, dict.fromkeys(held, ""))

    def note(self, name: str, role: str, life: int = 1, *held: str) -> bool:
        return self.buffer.note(MemberLife(name, life, role), self.now, dict.fromkeys(held, ""))

    def pass_s(self, seconds: float, **held: str) -> None:
        """Lets time pass, in which these generators say that they make something."""
        for _ in range(int(seconds)):
            self.now += 1
            for name, token in held.items():
                self.beat(name, token)
            self.buffer.tick(self.now)


# The bound


def test_with_staleness_0_generators_wait_until_the_batch_is_trained_and_published() -> None:
    desk = _Desk(8, groups=2, max_staleness=0)
    desk.make(), desk.make()
    assert desk.take() is None
    assert desk.prompts() == [0, 1]
    assert desk.take() is None  # the trainer trains
    desk.buffer.published("trainer", 2)
    assert desk.make().version == 2


def test_generators_work_ahead_by_max_staleness_and_a_batch_more() -> None:
    desk = _Desk(100, groups=2, max_staleness=3)
    assert sum(desk.take() is not None for _ in range(20)) == 8


def test_a_batch_may_pass_a_straggler_but_not_beyond_the_bound() -> None:
    desk = _Desk(10, groups=1, max_staleness=1)
    slow = desk.take()
    assert slow is not None
    desk.make()
    assert desk.prompts() == [1]  # it may come with the next one
    desk.buffer.published("trainer", 2)
    desk.make()
    assert desk.prompts() is None  # now it must
    desk.buffer.give(slow.token, made(slow))
    assert desk.prompts() == [0]


def test_several_publishes_for_one_batch_end_one_step() -> None:
    desk = _Desk(10)
    desk.make()
    desk.prompts()
    for version in (2, 3, 4):
        desk.buffer.published("trainer", version)
    assert (desk.buffer.status(0).step, desk.make().version) == (1, 4)


def test_groups_that_are_too_old_are_discarded_and_made_again() -> None:
    desk = _Desk(4, max_staleness=0, discards=True)
    slow = desk.take()
    assert slow is not None
    desk.make()
    assert desk.prompts() == [1]
    desk.buffer.published("trainer", 2)
    assert not desk.buffer.give(slow.token, made(slow))
    assert desk.make().prompt == slow.prompt
    assert desk.prompts() == [0]
    status = desk.buffer.status(0)
    assert (status.discarded, status.late, status.trained) == (1, 1, 1)


def test_rates_are_those_of_the_last_seconds() -> None:
    desk = _Desk(1000, max_staleness=999)
    for number in range(60):
        order = desk.take()
        assert order is not None
        desk.buffer.give(order.token, made(order), 50.0)
        if number % 2:
            desk.prompts(), desk.buffer.published("trainer", 2)
        desk.pass_s(1, g="")
    status = desk.buffer.status(desk.now)
    assert (status.rollouts_per_s, status.size_per_s, status.steps_per_s) == (1.0, 50.0, 0.5)
    desk.pass_s(30, g="")
    assert desk.buffer.status(desk.now).size_per_s == 0
    # A trainer that goes on from a state has made no steps yet.
    state = {**desk.buffer.begin("again", 1, 2, None), "step": 5000}
    desk.buffer.begin("restored", 1, 2, state)
    desk.pass_s(1, g="")
    assert desk.buffer.status(desk.now).steps_per_s == 0


# Nothing hangs, and nothing ends that only takes long


def test_generators_that_are_busy_with_what_is_not_wanted_may_finish_it() -> None:
    desk = _Desk(4, rollout_timeout_s=10.0, absence_s=5.0)
    desk.pass_s(14, g="of an earlier life of the buffer")
    assert desk.hand_out() is None
    desk.make()
    assert desk.prompts() == [0]
    desk.pass_s(2, g="of an earlier life of the buffer")
    with pytest.raises(
        GeneratorsGoneError, match="no generator goes on: g all work at one rollout for too long"
    ):
        desk.hand_out()


def test_a_trainer_does_not_wait_for_generators_that_are_gone() -> None:
    desk = _Desk(4, absence_s=20.0)
    desk.make()
    assert desk.prompts() == [0]
    desk.pass_s(25)  # 10 of them until it is lost
    assert desk.hand_out() is None
    desk.pass_s(10)
    with pytest.raises(GeneratorsGoneError, match=r"none was heard from for 2\d s"):
        desk.hand_out()


def test_a_slot_goes_to_generators_that_have_not_failed_at_it() -> None:
    desk = _Desk(2, max_staleness=0)
    desk.beat("other")
    order = desk.take("broken")
    assert order is not None
    desk.buffer.fail(order.token, "an error", desk.now)
    assert desk.take("broken") is None
    assert desk.make("other").prompt == order.prompt


def test_prompts_that_fail_one_after_the_other_are_an_error_until_it_begins_again() -> None:
    desk = _Desk(100, max_attempts=1)
    while (order := desk.take()) is not None:
        desk.buffer.fail(order.token, "an error", desk.now)
    with pytest.raises(PromptsFailedError, match=r"3 prompts, one after the other, .*an error"):
        desk.hand_out()
    desk.buffer.begin("trainer", 1, 1, None)
    desk.make()
    assert desk.prompts() == [3]


def test_a_trainer_without_a_state_gets_that_of_the_buffer_for_the_case_that_it_is_lost() -> None:
    desk = _Desk(3, max_staleness=0)
    desk.make(), desk.prompts(), desk.buffer.published("trainer", 2)
    state = desk.buffer.begin("another trainer", 1, 3, None)
    after = _Desk(3, max_staleness=0)
    after.buffer.begin("another trainer", 1, 3, state)
    assert after.make().prompt.index == 1


# Environments and rewards

_WITH_ENVIRONMENTS = {GENERATOR: 2, ENVIRONMENT: 2}
_WITH_REWARDS = {GENERATOR: 1, REWARD: 2}


def test_an_environment_is_leased_to_one_rollout_until_its_generator_lets_go() -> None:
    desk = _Desk(9, max_staleness=5, members=_WITH_ENVIRONMENTS, rollout_timeout_s=20.0)
    assert desk.take() is None
    assert desk.hand_out() is None
    assert "none of 2 environments is there" in desk.buffer.waits(desk.now)
    desk.note("e0", ENVIRONMENT)
    order = desk.take()
    assert order is not None
    assert order.environment == "e0"
    for _ in range(25):  # the rollout is given up, and its generator does not know that
        desk.pass_s(1, g=order.token)
        desk.note("e0", ENVIRONMENT)
        assert desk.take("other") is None
    assert "rollout 0 waits for a free environment" in desk.buffer.waits(desk.now)
    desk.buffer.give(order.token, made(order))
    assert desk.make("other").environment == "e0"


def test_an_environment_that_hangs_is_not_leased_again_before_its_next_life() -> None:
    desk = _Desk(9, max_staleness=5, members=_WITH_ENVIRONMENTS, absence_s=30.0)
    assert not desk.note("e0", ENVIRONMENT)
    first = desk.take()
    assert first is not None
    assert desk.buffer.fail(first.token, "no answer", desk.now, "hangs") == "e0"
    assert desk.note("e0", ENVIRONMENT)  # it is to start again
    assert desk.take() is None
    assert not desk.note("e1", ENVIRONMENT)
    second = desk.take()
    assert second is not None
    assert (second.prompt, second.environment) == (first.prompt, "e1")
    assert not desk.note("e0", ENVIRONMENT, 2)
    assert desk.make("other").environment == "e0"
    desk.buffer.give(second.token, made(second))
    for name, life in (("e0", 2), ("e1", 1)):
        desk.note(name, ENVIRONMENT, life)
        order = desk.take()
        assert order is not None
        desk.buffer.fail(order.token, "no answer", desk.now, "hangs")
    desk.prompts(), desk.prompts()
    for _ in range(29):
        desk.pass_s(1, g="")
        desk.note("e0", ENVIRONMENT, 2)
        desk.note("e1", ENVIRONMENT)
        assert desk.hand_out() is None
    desk.pass_s(1, g="")
    with pytest.raises(GeneratorsGoneError, match="no environment goes on: e0, e1"):
        desk.hand_out()


def test_what_a_lost_environment_held_up_is_made_again_and_is_no_failure() -> None:
    desk = _Desk(1, members=_WITH_ENVIRONMENTS, max_attempts=1)
    desk.note("e0", ENVIRONMENT)
    first = desk.take()
    assert first is not None
    desk.note("e0", ENVIRONMENT, 2)  # it has started again
    second = desk.take("other")
    assert second is not None
    assert (second.prompt, second.environment) == (first.prompt, "e0")
    assert second.lease > first.lease  # so it refuses the first one, if that still calls it
    assert not desk.buffer.give(first.token, made(first))  # of two lives
    desk.buffer.fail(second.token, "another node is gone", desk.now, "lost")
    assert desk.make().environment == "e0"
    assert desk.prompts() == [0]


def test_a_buffer_that_has_started_again_leases_at_once_and_after_all_leases_before() -> None:
    before = _Desk(9, members=_WITH_ENVIRONMENTS)
    before.note("e0", ENVIRONMENT)
    order = before.take()
    assert order is not None
    again = _Desk(9, leases=1 << 32, members=_WITH_ENVIRONMENTS)
    again.note("e0", ENVIRONMENT)
    again.beat("g", order.token)  # what it makes is worth nothing
    assert again.make("other").lease > order.lease


def test_a_generator_that_starts_again_gives_up_its_rollouts_before_it_is_ready() -> None:
    desk = _Desk(9, max_staleness=0, members=_WITH_ENVIRONMENTS)
    desk.note("e0", ENVIRONMENT)
    order = desk.take()
    assert order is not None
    desk.buffer.note(MemberLife("g", 2), desk.now, {}, threads=0)
    assert desk.take("g") is None  # a call of the life before, which comes late
    assert desk.buffer.status(desk.now).generators == []
    assert desk.make("other").prompt == order.prompt
    desk.note("g", GENERATOR, 2)
    assert desk.take("g") is None
    assert desk.buffer.status(desk.now).generators == ["g", "other"]


def test_a_rollout_waits_for_its_reward_while_the_generator_makes_another_one() -> None:
    desk = _Desk(9, max_staleness=5, members=_WITH_REWARDS)
    first = desk.make()
    assert desk.take("r", REWARD) is not None
    assert desk.take("r", REWARD) is None
    desk.make()
    second = desk.take("r", REWARD)
    assert second is not None
    assert second.draft == (second.prompt, 0)
    assert desk.prompts() is None
    desk.buffer.score(second.token, 0.5)
    desk.buffer.score(second.token, 0.6)  # twice
    assert not desk.buffer.give(first.token, made(first))
    batch = desk.hand_out()
    assert [(g.index, g.rollouts[0].reward) for g in batch.groups] == [(1, 0.5)]


def test_a_reward_that_takes_too_long_starts_again_while_another_one_judges() -> None:
    desk = _Desk(9, members=_WITH_REWARDS, reward_timeout_s=10.0)
    desk.make()
    slow = desk.take("r0", REWARD)
    assert slow is not None
    for _ in range(9):
        desk.pass_s(1)
        desk.note("r1", REWARD)
        assert not desk.note("r0", REWARD, 1, slow.token)
    desk.pass_s(1)
    assert desk.note("r0", REWARD, 1, slow.token)
    assert desk.take("r0", REWARD) is None
    again = desk.take("r1", REWARD)
    assert again is not None
    assert again.draft == slow.draft
    desk.buffer.score(again.token, 1.0)
    assert desk.prompts() == [0]


def test_a_slot_that_is_free_again_is_offered_until_it_is_taken_and_not_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Buffer(RolloutBuffer):
        def take(self, member: MemberLife, now: float) -> RolloutOrder | None:
            asked.append(member.name)
            return super().take(member, now)

    monkeypatch.setattr(_buffer_node, "RolloutBuffer", Buffer)
    monkeypatch.setattr(_buffer_node.lp, "restart_count", lambda: 0)
    monkeypatch.setattr(_buffer_node.lp.metrics, "view", lambda *_: None)

    async def run() -> None:
        order = PromptOrder(9, epochs=1, shuffle=False, seed=0)
        node = BufferNode(range(9), order, BufferRules(1, 1, 0))
        await node.begin("trainer", 1, 1, None)
        first = await node.take(MemberLife("g0", 0), 20.0)
        assert first is not None
        takers = [
            asyncio.create_task(node.take(MemberLife(f"g{each}", 0), 20.0)) for each in range(50)
        ]
        await asyncio.sleep(0)
        asked.clear()
        await node.fail(first[0].token, "an error")
        await asyncio.wait(takers, return_when=asyncio.FIRST_COMPLETED)
        assert asked[:2] == ["g0", "g1"]  # the first one has failed at it
        assert len(asked) < 5
        assert [each.done() for each in takers[:3]] == [False, True, False]
        for taker in takers:
            taker.cancel()

    asyncio.run(run())


# Parts


def test_a_rollout_that_is_cut_goes_on_with_its_parts_and_newer_weights() -> None:
    desk = _Desk(9, partial=True, max_attempts=1, rollout_timeout_s=20.0)
    first = desk.take()
    assert first is not None
    assert desk.buffer.add(first.token, 0, "a", 1) == 1
    assert desk.buffer.add(first.token, 0, "a", 1) == 1  # twice
    desk.buffer.published("trainer", 2)
    assert desk.buffer.add(first.token, 1, "b", 1) == 2
    desk.pass_s(20, g=first.token)
    assert desk.buffer.add(first.token, 2, "c", 2) == 0  # it has had its time
    second = desk.take("other")
    assert second is not None
    assert (second.prompt, second.version, second.parts) == (first.prompt, 2, ["a", "b"])
    assert not desk.buffer.give(first.token, made(first))
    desk.buffer.add(second.token, 2, "d", 2)
    desk.buffer.note(MemberLife("other", 2), desk.now)  # it is lost
    third = desk.take("other", life=2)
    assert third is not None
    assert third.parts == ["a", "b", "d"]
    desk.buffer.give(third.token, made(third))
    (group,) = desk.hand_out().groups
    (rollout,) = group.rollouts
    assert (rollout.value, rollout.versions) == (["a", "b", "d"], [1, 1, 2])


def test_a_rollout_without_a_new_part_in_its_time_has_failed() -> None:
    desk = _Desk(1, partial=True, max_attempts=2, rollout_timeout_s=10.0)
    for name in ("g", "other", "another"):
        order = desk.take(name)
        assert order is not None
        if name == "g":
            desk.buffer.add(order.token, 0, "a", 1)
        desk.pass_s(10, **{name: order.token})
    with pytest.raises(PromptsFailedError, match="another: it took longer than"):
        desk.hand_out()


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_whatever_happens_each_prompt_is_trained_once_within_the_bound(seed: int) -> None:
    _Story(random.Random(seed)).run()


class _Story:
    """Generators and trainers that do anything, in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        size = rng.randint(1, 4)
        self.rules = BufferRules(
            size,
            rng.randint(1, size),
            rng.randint(0, 3),
            discards=rng.random() < 0.3,
            partial=rng.random() < 0.3,
            rollout_timeout_s=30.0,
            reward_timeout_s=30.0,
            max_attempts=3,
            max_losses=3,
            members={
                GENERATOR: rng.randint(1, 4),
                **({ENVIRONMENT: rng.randint(1, 3)} if rng.random() < 0.4 else {}),
                **({REWARD: rng.randint(1, 2)} if rng.random() < 0.4 else {}),
            },
        )
        self.count, self.epochs = rng.randint(1, 12), rng.randint(1, 2)
        self.groups = rng.randint(1, 4)
        self.buffer = self.new_buffer()
        self.now = 0.0
        self.version = 1
        self.lives: dict[str, int] = {
            f"{role}[{index}]": 0
            for role, count in self.rules.members.items()
            for index in range(count)
        }
        #: What generators have, and what they have sent before.
        self.held: list[tuple[MemberLife, RolloutOrder]] = []
        self.sent: list[RolloutOrder] = []
        self.session, self.number = "s0", 0
        self.trained: collections.Counter[PromptRef] = collections.Counter()
        self.saved: tuple[Any, collections.Counter[PromptRef]] | None = None
        self.batch: list[PromptRef] = []
        self.is_over = self.waits = False
        #: Whether it publishes only between two batches, as a trainer of one thread does.
        self.is_orderly = rng.random() < 0.8

    def new_buffer(self) -> RolloutBuffer:
        order = PromptOrder(self.count, epochs=self.epochs, shuffle=True, seed=3)
        return RolloutBuffer(self.rules, order)

    def run(self) -> None:
        self.buffer.begin(self.session, self.groups, self.version, None)
        for _ in range(300):
            self.rng.choice(self.moves)(self)
        for _ in range(3000):  # now all goes well
            if self.is_over:
                break
            self.pass_time(0.1)
            self.beat()
            for name in self.lives:
                self.take(name)
            for member, order in self.held:
                self.finish(member, order)
            self.held.clear()
            self.read()
            if not self.waits:
                self.publish()
        assert self.is_over
        uses = {PromptRef(e, i) for e in range(self.epochs) for i in range(self.count)}
        assert set(self.trained) == uses
        assert set(self.trained.values()) == {1}

    # What may happen

    def pass_time(self, seconds: float | None = None) -> None:
        self.now += self.rng.choice([0.1, 1, 4, 40]) if seconds is None else seconds
        self.buffer.tick(self.now)

    def take(self, name: str | None = None) -> None:
        member = self.life(name or self.rng.choice(list(self.lives)))
        if member.role == ENVIRONMENT:
            return
        if (order := self.buffer.take(member, self.now)) is not None:
            assert order.version == self.version
            assert bool(order.environment) == (
                member.role == GENERATOR and ENVIRONMENT in self.rules.members
            )
            self.held.append((member, order))

    def life(self, name: str) -> MemberLife:
        return MemberLife(name, self.lives[name], name.partition("[")[0])

    def finish(self, member: MemberLife, order: RolloutOrder) -> None:
        if member.role == REWARD:
            one = order.prompt, order.rollout
            drafts = order.draft if self.rules.partial else [order.draft]
            assert set(drafts) <= {one}
            self.buffer.score(order.token, one)
        else:
            self.add(order)
            self.buffer.give(order.token, made(order, member.name))

    def add(self, order: RolloutOrder | None = None) -> None:
        """A part is made: the next one of those that it knows of, or one that is late or doubled."""
        if not self.rules.partial or not (order or self.held):
            return
        is_last = order is not None
        order = order or self.rng.choice(self.held)[1]
        if order.draft is None:
            number = len(order.parts) + (0 if is_last else self.rng.choice([0, 0, 1]))
            self.buffer.add(order.token, number, (order.prompt, order.rollout), order.version)

    def give(self) -> None:
        if self.held:
            member, order = self.held.pop(self.rng.randrange(len(self.held)))
            self.finish(member, order)
            self.sent.append(order)

    def give_twice(self) -> None:
        if self.sent:
            order = self.rng.choice(self.sent)
            assert not self.buffer.give(order.token, made(order))
            self.buffer.score(order.token, "twice")

    def fail(self) -> None:
        if self.held and self.rng.random() < 0.2:
            fault = self.rng.choice(["", "lost", "hangs"])
            self.buffer.fail(self.held.pop()[1].token, "an error", self.now, fault)

    def start_again(self, name: str = "") -> None:
        name = name or self.rng.choice(list(self.lives))
        self.lives[name] += 1
        self.buffer.note(self.life(name), self.now)

    def beat(self) -> None:
        for name in self.lives:
            member = self.life(name)
            held = {order.token: "" for each, order in self.held if each == member}
            if self.buffer.note(member, self.now, held):
                self.start_again(name)

    def read(self) -> None:
        if self.is_over:
            return
        self.batch = []  # it is trained: the next one is asked for
        try:
            handed = self.buffer.hand_out(self.session, self.number, self.now)
        except (PromptsFailedError, GeneratorsGoneError):
            self.restore()
            return
        self.waits = handed is None
        if handed is None:
            return
        again = self.buffer.hand_out(self.session, self.number, self.now)
        assert again == handed  # the answer was lost
        batch, state = handed
        self.number += 1
        for failed in batch.set_aside:
            assert failed.errors
            self.trained[PromptRef(failed.epoch, failed.index)] += 1
        self.is_over = not batch.groups
        assert self.is_over or len(batch.groups) == self.groups or self.ends_with(batch.groups)
        for group in batch.groups:
            assert group.staleness <= self.rules.max_staleness
            places, ref = [], PromptRef(group.epoch, group.index)
            for each in group.rollouts:
                parts = each.value if self.rules.partial else [each.value]
                ((prompt, place),) = set(parts)  # none of another rollout
                assert prompt == ref
                assert REWARD not in self.rules.members or each.reward == (prompt, place)
                assert len(each.versions) == len(parts)
                places.append(place)
            assert len(places) == len(set(places)) >= self.rules.min_group_size
            self.trained[ref] += 1
            self.batch.append(ref)
        self.saved = state, self.trained.copy()
        if self.is_orderly and not self.rules.discards:
            assert not self.buffer.status(self.now).discarded

    def ends_with(self, groups: Any) -> bool:
        return sum(self.trained.values()) + len(groups) == self.count * self.epochs

    def publish(self) -> None:
        if self.is_orderly and self.waits:
            return
        self.version += 1
        self.buffer.published(self.session, self.version)
        self.batch = []

    def restore(self) -> None:
        """Trainer or buffer begins again, from the state after the last batch."""
        if self.rng.random() < 0.5:
            self.buffer = self.new_buffer()
        state, self.trained = (None, collections.Counter()) if self.saved is None else self.saved
        self.trained = self.trained.copy()
        if state is None:
            self.buffer = self.new_buffer()
        self.session, self.number = self.session + "'", 0
        self.version += 1
        self.buffer.published(self.session, self.version)
        self.buffer.begin(self.session, self.groups, self.version, state)
        self.is_over, self.batch, self.waits = False, [], False

    def replace_trainer(self) -> None:
        """By one that has lost all it knew: the last batch may not have been trained."""
        if self.is_over or self.rng.random() > 0.1:
            return
        old, self.session, self.number = self.session, self.session + "+", 0
        self.buffer.begin(self.session, self.groups, self.version, None)
        with pytest.raises(TrainerReplacedError):
            self.buffer.hand_out(old, 0, self.now)
        self.trained.subtract(self.batch)
        self.trained += collections.Counter()  # drops zeros
        self.batch, self.waits = [], False

    def go_back(self) -> None:
        if self.rng.random() < 0.1:
            self.restore()

    moves = [
        pass_time,
        *[take] * 6,
        *[give] * 6,
        give_twice,
        fail,
        *[add] * 2,
        start_again,
        *[beat] * 3,
        *[read] * 3,
        *[publish] * 2,
        replace_trainer,
        go_back,
    ]
