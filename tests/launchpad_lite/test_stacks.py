"""How the stacks of other threads are looked at."""

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
import unittest.mock
import warnings
import weakref
from collections.abc import Coroutine, Generator
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.life.timing import DEFAULT
from launchpad_lite.process.stacks import describe_threads, stacks_of_threads
from launchpad_lite.testing import poll_until


def test_no_garbage_is_collected_while_frames_of_other_threads_are_looked_at() -> None:
    phases: list[str] = []
    done = threading.Event()

    def note(phase: str, _: object) -> None:
        phases.append(phase)

    thread = threading.Thread(target=done.wait)
    thread.start()
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        with stacks_of_threads() as stacks:
            phases.clear()
            texts = [traceback.StackSummary.extract(stack) for stack in stacks.values()]
            assert len(texts) >= 2
            assert not phases
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
        done.set()
        thread.join()


def test_a_stack_is_whole_though_its_thread_runs_on() -> None:
    over = threading.Event()

    def run_on() -> None:
        while not over.wait(0.0001):
            pass

    thread = threading.Thread(target=run_on)
    thread.start()
    with stacks_of_threads() as stacks:
        time.sleep(0.05)
        names = [frame.f_code.co_name for frame, _ in stacks[thread.ident or 0]]
    over.set()
    thread.join()
    assert names[:4] == ["_bootstrap", "_bootstrap_inner", "run", "run_on"]


def test_what_a_thread_uses_is_freed_with_it_though_it_was_looked_at() -> None:
    used: list[weakref.ref[_Waiting]] = []

    def use() -> None:
        waiting = _Waiting()
        used.append(weakref.ref(waiting))
        waiting.wait()

    thread = threading.Thread(target=use)
    gc.disable()
    try:
        thread.start()
        poll_until(lambda: used and used[0]().begun.is_set())  # type: ignore[union-attr]
        assert "in use" in describe_threads()
        used[0]().go_on.set()  # type: ignore[union-attr]
        thread.join()
        assert used[0]() is None
    finally:
        gc.enable()


def test_a_child_that_is_forked_meanwhile_collects_garbage_and_looks_at_frames() -> None:
    codes: list[int] = []

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from 3.12 on, of threads
            child = os.fork()
        if not child:
            try:
                describe_threads()
            finally:
                os._exit(0 if gc.isenabled() else 3)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with stacks_of_threads():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert codes == [0]


class _Waiting:
    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        assert self.go_on.wait(20)


def test_a_thread_that_waits_for_a_call_says_for_which() -> None:
    node = _Waiting()
    with courier.Server(node, in_process="wire") as server:
        client: Any = courier.Client(server.address)
        courier.wait_until_ready(client)
        waits = f"(waits for {server.address}: wait)"
        for call in (client.wait, lambda: client.futures.wait().result()):
            thread = threading.Thread(target=lambda call=call: call())
            thread.start()
            assert node.begun.wait(20)
            # A future's call may have begun before its thread waits for it.
            poll_until(lambda ident=thread.ident: waits in describe_threads([ident or 0]))
            node.begun.clear()
            node.go_on.set()
            thread.join()
            node.go_on.clear()
        courier.close(client)


class _OwnCoroutine(Coroutine[Any, Any, None]):
    """A coroutine that code of the user implements."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def send(self, _: object) -> None:
        return None

    def throw(self, *error: Any) -> None:
        raise StopIteration

    def close(self) -> None:
        pass

    def __await__(self) -> Generator[Any, Any, None]:
        raise NotImplementedError


def test_a_question_what_calls_wait_for_runs_no_code_of_callable_objects() -> None:
    class Method:
        def __call__(self) -> None: ...

        def __getattr__(self, name: str) -> Any:
            assert name != "__self__"
            raise AttributeError(name)

    with courier.Server(secret=courier.Secret.generate()) as server:
        server.bind("method", Method())
        assert server.dispatcher.waiting() == []


class _AnswersAll:
    """Runs code when it is asked for an attribute, as clients and mocks do."""

    def __init__(self, *, is_awaited: bool) -> None:
        self._is_awaited = is_awaited

    def __getattr__(self, name: str) -> Any:
        assert not name.startswith("cr_"), name
        raise AttributeError(name)

    def __await__(self) -> Any:
        return self if self._is_awaited else _waits_beside(self)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> "asyncio.Future[None]":
        return _future()


def _waits_beside(_: object) -> "Generator[asyncio.Future[None], None, None]":
    yield _future()


def _future() -> "asyncio.Future[None]":
    """Returns a future that makes the task wait to which it is yielded."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future._asyncio_future_blocking = True
    return future


async def _wait_for_it(*, is_awaited: bool) -> None:
    await _AnswersAll(is_awaited=is_awaited)


@pytest.mark.parametrize(
    ("coroutine", "shown"),
    [
        (_OwnCoroutine, ", in look"),
        (lambda: _wait_for_it(is_awaited=True), "in _wait_for_it"),
        (lambda: _wait_for_it(is_awaited=False), "in _wait_for_it"),
    ],
    ids=["of their coroutines", "of what they await", "of what is beside that"],
)
def test_a_look_at_tasks_runs_no_code(coroutine: Any, shown: str) -> None:
    async def look() -> None:
        task = asyncio.create_task(coroutine())
        await asyncio.sleep(0)
        assert shown in await asyncio.to_thread(describe_threads)
        task.cancel()

    asyncio.run(look())


def test_a_look_at_nodes_as_threads_takes_the_frames_of_all_threads_once(
    launch_program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lp.Program("many")
    with program.group("node"):
        for _ in range(20):
            program.add_node(lp.PyNode(lp.wait_for_stop))
    timing = DEFAULT._replace(deadlock_s=1000.0)
    running = launch_program(program, "test_mt", timing=timing).running
    take = unittest.mock.Mock(side_effect=sys._current_frames)
    monkeypatch.setattr(sys, "_current_frames", take)
    assert len(running.stacks()) == 21
    assert take.call_count < 4
