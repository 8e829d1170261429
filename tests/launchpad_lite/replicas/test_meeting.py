"""The meeting of replicas: generations begin when all are there, and end when one is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from launchpad_lite.replicas import ReplicaLostError
from launchpad_lite.replicas._meeting import Generation, GenerationEnd, Meeting
from tests.simulated_time import simulate


class Member:
    """Somebody who attends a meeting."""

    @classmethod
    async def comes(cls, meeting: Meeting, rank: int) -> "Member":
        member = cls()
        stream = meeting.attend(rank, f"info {rank}")
        assert await anext(stream) is None
        member.begun = asyncio.ensure_future(meeting.begin(rank))
        member.ended = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        return member

    begun: "asyncio.Future[Generation]"
    ended: "asyncio.Future[GenerationEnd | None]"

    async def goes(self) -> None:
        """Stops reading its stream."""
        self.ended.cancel()
        await asyncio.wait([self.ended])


def meet(size: int, story: Callable[[Meeting], Awaitable[None]], **options: Any) -> None:
    """Runs a story in an event loop."""
    simulate(asyncio.wait_for(story(Meeting(size, **options)), 5))


def test_a_generation_begins_when_all_are_there_and_knows_of_each() -> None:
    async def story(meeting: Meeting) -> None:
        first = await Member.comes(meeting, 1)
        assert not first.begun.done()
        second = await Member.comes(meeting, 0)
        assert (
            await first.begun == await second.begun == Generation(1, (0, 1), ("info 0", "info 1"))
        )

    meet(2, story)


def test_all_learn_of_a_loss_and_meet_again() -> None:
    async def story(meeting: Meeting) -> None:
        members = [await Member.comes(meeting, rank) for rank in range(3)]
        await members[2].begun
        await members[1].goes()
        assert await members[0].ended == await members[2].ended == GenerationEnd(1)
        again = [await Member.comes(meeting, rank) for rank in (0, 2, 1)]
        assert {(await member.begun).number for member in again} == {2}

    meet(3, story)


def test_who_comes_again_takes_the_place_of_its_earlier_life() -> None:
    async def story(meeting: Meeting) -> None:
        members = [await Member.comes(meeting, rank) for rank in (0, 1)]
        again = await Member.comes(meeting, 1)  # its end was not noticed yet
        assert await members[0].ended == GenerationEnd(1)
        first = await Member.comes(meeting, 0)
        assert await first.begun == await again.begun == Generation(2, (0, 1), ("info 0", "info 1"))
        await members[1].goes()  # noticed now: nobody is lost by it
        assert not first.ended.done()

    meet(2, story)


def test_who_leaves_is_not_lost() -> None:
    async def story(meeting: Meeting) -> None:
        members = [await Member.comes(meeting, rank) for rank in (0, 1)]
        await meeting.leave(1)
        await members[1].goes()
        assert not members[0].ended.done()

    meet(2, story)


def test_replica_0_leaves_when_all_others_have_left_or_are_lost() -> None:
    async def story(meeting: Meeting) -> None:
        members = [await Member.comes(meeting, rank) for rank in range(3)]
        leaving = asyncio.ensure_future(meeting.leave(0))
        await meeting.leave(1)
        await asyncio.sleep(0)
        assert not leaving.done()
        await members[2].goes()
        await leaving

    meet(3, story)


def test_numbers_of_an_earlier_life_do_not_come_again() -> None:
    async def first() -> int:
        meeting = Meeting(1, life=1)
        return (await (await Member.comes(meeting, 0)).begun).number

    assert asyncio.run(first()) > 1 << 32


def test_those_who_are_enough_go_on_until_the_lost_one_is_back() -> None:
    async def story(meeting: Meeting) -> None:
        members = [await Member.comes(meeting, rank) for rank in range(3)]
        await members[1].goes()
        rest = [await Member.comes(meeting, rank) for rank in (2, 0)]
        assert await rest[0].begun == Generation(2, (0, 2), ("info 0", "info 2"))
        await Member.comes(meeting, 1)
        assert await rest[0].ended == await rest[1].ended == GenerationEnd(1, is_back=True)
        again = [await Member.comes(meeting, rank) for rank in (0, 2)]
        assert (await again[0].begun).members == (0, 1, 2)

    meet(3, story, least=2, patience_s=0.01)


def test_the_time_to_wait_for_others_begins_again_with_each_loss() -> None:
    async def story(meeting: Meeting) -> None:
        first, second = [await Member.comes(meeting, rank) for rank in range(2)]
        await second.goes()
        await Member.comes(meeting, 0)
        await asyncio.sleep(0.1)
        await (second := await Member.comes(meeting, 1)).begun
        await second.goes()
        first = await Member.comes(meeting, 0)
        await asyncio.sleep(0.15)  # the time after the loss before this one is over
        assert not first.begun.done()
        assert (await first.begun).members == (0,)

    meet(2, story, least=1, patience_s=0.2)


def test_who_does_not_attend_is_told_so() -> None:
    with pytest.raises(ReplicaLostError, match="replica 1 does not attend"):
        asyncio.run(Meeting(2).begin(1))


def test_fewer_never_begin_before_all_were_there_nor_without_the_first() -> None:
    async def story(meeting: Meeting) -> None:
        members = [await Member.comes(meeting, rank) for rank in (0, 1)]
        await asyncio.sleep(0.01)
        assert not members[0].begun.done()
        last = await Member.comes(meeting, 2)
        await last.begun
        await members[0].goes()
        rest = [await Member.comes(meeting, rank) for rank in (1, 2)]
        await asyncio.sleep(0.01)
        assert not rest[0].begun.done()

    meet(3, story, least=2, patience_s=0.0)
