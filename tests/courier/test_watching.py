"""What a system without epoll has instead does the same."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import courier
from courier._engine import background_reader, host
from courier._engine.watching import (
    READ,
    WRITE,
    EpollWatcher,
    PollWatcher,
    Watcher,
    make_watcher,
)

WATCHERS = [PollWatcher] + ([EpollWatcher] if isinstance(make_watcher(), EpollWatcher) else [])


@pytest.fixture(params=WATCHERS)
def watcher(request: pytest.FixtureRequest) -> Iterator[Watcher]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_it_tells_what_is_ready_as_long_as_it_is(watcher: Watcher, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    watcher.watch(reading, READ)
    assert watcher.poll(0.0) == []
    os.write(writing, b"x")
    assert watcher.poll(20.0) == [(reading, READ)]
    assert watcher.poll(20.0) == [(reading, READ)]
    watcher.forget(reading)
    assert watcher.poll(0.0) == []


def test_what_is_watched_once_is_told_once(watcher: Watcher, pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, b"x")
    watcher.watch(reading, READ, once=True)
    assert watcher.poll(20.0) == [(reading, READ)]
    assert watcher.poll(0.0) == []
    watcher.watch(reading, READ, once=True)
    assert watcher.poll(20.0) == [(reading, READ)]


def test_what_is_to_be_noticed_can_change(watcher: Watcher, pipe: tuple[int, int]) -> None:
    _, writing = pipe
    watcher.watch(writing, READ)
    assert watcher.poll(0.0) == []
    watcher.watch(writing, WRITE)
    assert watcher.poll(20.0) == [(writing, WRITE)]


def test_another_thread_wakes_it(watcher: Watcher) -> None:
    timer = threading.Timer(0.05, watcher.wake)
    timer.start()
    assert watcher.poll(30.0) == []
    timer.join(20)  # it must not find the watcher closed


def test_another_thread_changes_what_it_waits_for(watcher: Watcher, pipe: tuple[int, int]) -> None:
    _, writing = pipe
    timer = threading.Timer(0.05, watcher.watch, (writing, WRITE))
    timer.start()
    events: list[Any] = []
    while not events:
        events = watcher.poll(30.0)
    assert events == [(writing, WRITE)]
    timer.join(20)  # it must not find the watcher closed


def test_descriptors_that_were_closed_do_no_harm(watcher: Watcher) -> None:
    reading, writing = os.pipe()
    watcher.watch(reading, READ)
    os.close(reading)
    os.close(writing)
    watcher.watch(-1, READ)
    watcher.watch(reading, READ)
    watcher.poll(0.0)
    assert watcher.poll(0.0) == []
    watcher.forget(reading)


def test_calls_work_without_epoll(monkeypatch: pytest.MonkeyPatch, serve: Any) -> None:
    monkeypatch.setattr(host, "make_watcher", PollWatcher)
    monkeypatch.setattr(background_reader, "make_watcher", PollWatcher)
    monkeypatch.setattr(background_reader.BACKGROUND_READER, "_watcher", None)
    _, client = serve(lambda value: value)
    assert client(1) == 1
    assert [future.result(20) for future in [client.futures(i) for i in range(500)]] == [
        *range(500)
    ]
    done = threading.Event()
    client.futures(1).add_done_callback(lambda _: done.set())
    assert done.wait(20)
    array = np.arange(1 << 20)
    assert (client(array) == array).all()
    courier.close(client)
