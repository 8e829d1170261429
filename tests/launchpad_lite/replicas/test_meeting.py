"""The meeting of replicas: generations begin when all are there, and end when one is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from launchpad_lite.replicas._meeting import Generation, Lost, Meeting


def meet(size: int, story: Callable[[Meeting], Awaitable[None]]) -> None:
    """Runs a story in an event loop."""

    async def run() -> None:
        await asyncio.wait_for(story(Meeting(size)), 5)

    asyncio.run(run())


async def attend(meeting: Meeting, *ranks: int) -> "list[tuple[AsyncIterator[Any], Any]]":
    """Has replicas come; returns the stream of each, and the call that waits for the generation."""
    streams = [meeting.attend(rank, f"info {rank}") for rank in ranks]
    calls = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    return list(zip(streams, calls, strict=True))


def test_a_generation_begins_when_all_are_there_and_knows_of_each() -> None:
    async def story(meeting: Meeting) -> None:
        [(_, first)] = await attend(meeting, 1)
        assert not first.done()
        [(_, second)] = await attend(meeting, 0)
        assert await first == await second == Generation(1, ("info 0", "info 1"))

    meet(2, story)


def test_all_learn_of_a_loss_and_meet_again() -> None:
    async def story(meeting: Meeting) -> None:
        members = await attend(meeting, 0, 1, 2)
        for _, call in members:
            await call
        await members[1][0].aclose()
        assert await anext(members[0][0]) == await anext(members[2][0]) == Lost(1)
        for _, call in await attend(meeting, 0, 2, 1):
            assert (await call).number == 2

    meet(3, story)


def test_who_comes_again_takes_the_place_of_its_earlier_life() -> None:
    async def story(meeting: Meeting) -> None:
        members = await attend(meeting, 0, 1)
        for _, call in members:
            await call
        [(_, again)] = await attend(meeting, 1)  # its end was not noticed yet
        assert await anext(members[0][0]) == Lost(1)
        [(_, call)] = await attend(meeting, 0)
        assert await call == await again == Generation(2, ("info 0", "info 1"))
        await members[1][0].aclose()  # noticed now: nobody is lost by it
        [(_, third)] = await attend(meeting, 0)
        assert not third.done()

    meet(2, story)


def test_who_leaves_is_not_lost() -> None:
    async def story(meeting: Meeting) -> None:
        members = await attend(meeting, 0, 1)
        for _, call in members:
            await call
        await meeting.leave(1)
        await members[1][0].aclose()
        ended = asyncio.ensure_future(anext(members[0][0]))
        await asyncio.sleep(0)
        assert not ended.done()
        ended.cancel()

    meet(2, story)
