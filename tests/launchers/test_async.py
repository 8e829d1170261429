"""Nodes whose code is async: run, methods, ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from tests.launchers.running import program_of

both = pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])


class Learner:
    """Serves and runs on one loop."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._thread: int | None = None
        self._steps = 0

    async def step(self) -> bool:
        await asyncio.sleep(0)
        self._steps += 1
        return threading.get_ident() == self._thread

    async def wait_for(self, steps: int) -> int:
        while self._steps < steps:  # noqa: ASYNC110 - so that many tasks run for long
            await asyncio.sleep(0.001)
        return steps

    async def items(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def run(self) -> None:
        self._thread = threading.get_ident()
        await asyncio.to_thread(lp.wait_for_stop)
        (self._folder / "learner").touch()


class Actor:
    """Calls, and stops the program when the function has run."""

    def __init__(self, learner: Any, folder: str) -> None:
        self._learner = learner
        self._folder = Path(folder)

    async def run(self) -> None:
        aio = self._learner.aio
        waiting = [asyncio.create_task(aio.wait_for(2)) for _ in range(20)]
        await aio.step()
        assert await aio.wait_for(1) == 1
        while not await aio.step():
            pass  # `run` of the learner may begin after its first call
        assert await asyncio.gather(*waiting) == [2] * 20
        assert [item async for item in aio.items()] == list(self._learner.items()) == [0, 1, 2]
        while not (self._folder / "function").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lp.stop()


async def _touch(learner: Any, folder: str) -> None:
    await learner.aio.step()
    (Path(folder) / "function").touch()


@both
def test_async_code_runs_and_is_served(launch_program: Any, launcher: str, tmp_path: Path) -> None:
    program = lp.Program("async")
    learner = program.add_node(lp.CourierNode(Learner, str(tmp_path)), label="learner")
    program.add_node(lp.PyNode(_touch, learner, str(tmp_path)), label="function")
    actor = lp.CourierNode(Actor, learner, str(tmp_path))
    program.add_node(lp.ColocationNode([actor]), label="actor")
    result = launch_program(program, launcher).wait()
    assert result.outcome is lp.Outcome.STOPPED, result
    assert (result.failures, result.killed) == ((), ())
    assert {path.name for path in tmp_path.iterdir()} >= {"learner", "function"}


class Stubborn:
    """Does not look at the stop, and notes its end."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def run(self) -> None:
        try:
            lp.stop()
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(0)
            (self._folder / "cleaned_up").touch()


@both
@pytest.mark.parametrize("kind", [lp.CourierNode, lp.PyClassNode])
def test_who_sleeps_is_cancelled_after_the_notice(
    launch_program: Any, launcher: str, kind: Any, tmp_path: Path
) -> None:
    program = program_of(node=kind(Stubborn, str(tmp_path)))
    result = launch_program(program, launcher, notice_s=0.3).wait()
    assert result.killed == ("node[0]",)
    assert (tmp_path / "cleaned_up").exists()


async def _leave_a_thread() -> None:
    waits = asyncio.create_task(asyncio.to_thread(lp.wait_for_stop))
    await asyncio.sleep(0)
    assert not waits.done()


async def _fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("of an async function")


@both
def test_a_thread_that_waits_for_the_stop_does_not_hold_up_the_end(
    launch_program: Any, launcher: str
) -> None:
    program = program_of(node=lp.PyNode(_leave_a_thread))
    assert launch_program(program, launcher).wait().outcome is lp.Outcome.COMPLETED


@both
def test_an_async_function_fails_as_others_do(launch_program: Any, launcher: str) -> None:
    program = program_of(node=lp.PyNode(_fail))
    with pytest.raises(lp.NodeFailedError, match="of an async function"):
        launch_program(program, launcher).wait()


async def _make() -> None: ...


class Keeps:
    """Has a state that would be awaited."""

    async def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


def test_what_would_not_be_awaited_is_refused(tmp_path: Path) -> None:
    for kind in (lp.CourierNode, lp.PyClassNode):
        with pytest.raises(TypeError, match="async or yields"):
            kind(_make)
    with pytest.raises(TypeError, match="not awaited"):
        lp.register_stop_handler(_make)
    program = program_of(keeps=lp.CourierNode(Keeps))
    with pytest.raises(lp.ProgramError, match=r"Keeps\.save is async"):
        lp.plan(program, "local_mt", checkpoints=str(tmp_path))


def test_a_node_is_serial_or_has_several_threads() -> None:
    with pytest.raises(ValueError, match="Give one of them"):
        lp.CourierNode(Keeps, serial=True, courier_kwargs={"thread_pool_size": 2})


class Counter:
    """Loses counts if two methods run at the same time."""

    def __init__(self) -> None:
        self._count = 0

    async def increase(self) -> int:
        count = self._count
        await asyncio.sleep(0)
        self._count = count + 1
        return self._count


class Users:
    """Calls many times at once."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter

    async def run(self) -> None:
        counts = await asyncio.gather(*(self._counter.aio.increase() for _ in range(50)))
        assert sorted(counts) == list(range(1, 51)), counts


def test_the_methods_of_a_serial_node_run_one_by_one(launch_program: Any) -> None:
    program = lp.Program("serial")
    counter = program.add_node(lp.CourierNode(Counter, serial=True), label="counter")
    program.add_node(lp.PyClassNode(Users, counter), label="users")
    assert launch_program(program, "test_mt").wait().outcome is lp.Outcome.COMPLETED


def test_what_would_not_be_run_is_refused() -> None:
    def yields() -> Iterator[int]:
        yield 1

    class Awaits:
        async def __init__(self) -> None: ...  # type: ignore[misc]

    with pytest.raises(TypeError, match="yields: calling it would run nothing of it"):
        lp.PyNode(yields)
    with pytest.raises(TypeError, match="Awaits is async or yields"):
        lp.CourierNode(Awaits)
