"""Calls within one process: what is copied, which thread runs them, and who else may come."""

import asyncio
import concurrent.futures
import importlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import courier
from tests.courier.conftest import Reserve, Script, Serve
from tests.courier.served import Node
from tests.courier.waiting import wait_until

_PATIENCE_S = 20.0
direct = pytest.mark.parametrize("mode", ["copy", "share"])


def _in_thread(function: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(_PATIENCE_S)


def _peer() -> str:
    return courier.current_call().peer


def _make_fast(client: Any, *args: Any) -> None:
    for _ in range(50):
        client.apply(*args)


def test_copies_are_the_default(secret: courier.Secret, node: Node) -> None:
    with courier.Server(node, secret=secret) as server:
        client = courier.Client(server.address, secret=secret)
        array = np.zeros(3)
        result = client.keep(array)
        assert "own" in client.apply(_peer)
        courier.close(client)
    assert node.kept is not array
    assert result is not node.kept


@pytest.mark.parametrize("size", [3, 1 << 10, 1 << 18, 1 << 20])
def test_copied_arrays_are_independent_on_all_sides(serve: Serve, node: Node, size: int) -> None:
    _, client = serve(node, in_process="copy")
    array = np.zeros(size)
    for call in (client.keep, lambda value: client.futures.keep(value).result(_PATIENCE_S)):
        array[:] = 0
        result = call(array)
        array[:] = 1
        result[:] = 2
        assert (node.kept == 0).all()
        node.kept[:] = 3
        assert (array == 1).all()
        assert (result == 2).all()
    value = [bytearray(b"abc")]
    result = client.keep(value)
    value[0][:] = result[0][:] = b"xyz"
    assert node.kept == [b"abc"]


def test_shared_objects_are_the_same_on_both_sides(serve: Serve, node: Node) -> None:
    item = np.zeros(3)
    server, client = serve(node, in_process="share")
    server.bind("items", lambda: (item for _ in range(3)))
    for value in (object(), np.zeros(3), [1], threading.Lock(), lambda: None):
        assert client.keep(value) is value
        assert node.kept is value
        assert client.futures.keep(value).result(_PATIENCE_S) is value
        assert asyncio.run(client.aio.keep(value)) is value
    assert all(each is item for each in client.items())


def test_an_unknown_way_is_a_value_error(secret: courier.Secret) -> None:
    with pytest.raises(ValueError, match="teleport"):
        courier.Server(Node(), secret=secret, in_process="teleport")  # type: ignore[arg-type]


# Threads


@direct
def test_a_fast_method_runs_in_the_thread_of_a_caller_who_waits(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode)
    _in_thread(lambda: _wait_until_it_runs_here(client))


def _wait_until_it_runs_here(client: Any) -> None:
    # A run that the system interrupts is not fast, so that the next may be elsewhere again.
    wait_until(lambda: bool(client.apply(threading.get_ident) == threading.get_ident()))


def test_a_fast_method_answers_while_another_thread_loads_torch(
    serve: Serve, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = serve(node, in_process="share")
    test = SimpleNamespace(is_loading=threading.Event(), goes_on=threading.Event())
    monkeypatch.setitem(sys.modules, "the_test", test)
    (tmp_path / "torch.py").write_text(
        "import the_test; the_test.is_loading.set(); the_test.goes_on.wait()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # is to be as it was after the test
    del sys.modules["torch"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        loading = pool.submit(importlib.import_module, "torch")
        try:
            assert test.is_loading.wait(_PATIENCE_S)
            _in_thread(lambda: _wait_until_it_runs_here(client))
        finally:
            test.goes_on.set()
        loading.result(_PATIENCE_S)


def _thread_name() -> str:
    return threading.current_thread().name


def test_a_method_that_has_not_shown_to_be_fast_runs_in_a_thread_of_the_server(
    serve: Serve, node: Node
) -> None:
    _, client = serve(node, in_process="share")
    assert _in_thread(lambda: client.apply(_thread_name)).startswith("courier-handler")

    def slow_then_fast() -> str:
        _make_fast(client, _thread_name)
        for _ in range(20):
            client.apply(time.sleep, 0.01)
        return str(client.apply(_thread_name))

    assert _in_thread(slow_then_fast).startswith("courier-handler")


def test_no_method_runs_in_the_main_thread_or_below_an_event_loop(serve: Serve, node: Node) -> None:
    assert threading.current_thread() is threading.main_thread()
    _, client = serve(node, in_process="share")
    _make_fast(client, _thread_name)
    assert client.apply(_thread_name).startswith("courier-handler")

    async def call() -> list[str]:
        awaited = await client.aio.apply(_thread_name)
        # A method may run a loop of its own, which it could not below another one.
        return [
            awaited,
            client.apply(_thread_name),
            client.apply(asyncio.run, asyncio.sleep(0, "")),
        ]

    names = _in_thread(lambda: (_make_fast(client, _thread_name), asyncio.run(call()))[1])
    assert [name[:15] for name in names] == ["courier-handler", "courier-handler", ""]


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_handlers_run_at_once_than_threads_were_given(
    serve: Serve, mode: str, size: int, script: Script
) -> None:
    lock = threading.Lock()
    running = most = total = 0

    def enter(seconds: float) -> None:
        nonlocal running, most, total
        with lock:
            running += 1
            total += 1
            most = max(most, running)
        if seconds:
            time.sleep(seconds)
        with lock:
            running -= 1

    server, local = serve(enter, in_process=mode, thread_pool_size=size)
    elsewhere = script(
        "client = courier.Client(sys.argv[1], secret=secret, call_timeout=60)\n"
        "for index in range(120):\n"
        "    client(0.003 if index % 40 == 39 else 0)\n"
        "assert all(f.result() is None for f in [client.futures(0) for _ in range(120)])\n",
        server.address,
    )

    def call(thread: int) -> None:
        for index in range(150):
            seconds = 0.003 if index % 40 == thread else 0
            if thread % 3:
                local(seconds)
            else:
                local.futures(seconds).result(_PATIENCE_S)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(6)))
    elsewhere.output()
    assert most <= size
    assert running == 0
    assert total == 6 * 150 + 240


# Other servers


@direct
def test_another_server_at_the_same_port_answers_next(
    serve: Serve, node: Node, reserve: Reserve, mode: str
) -> None:
    there = {"port": reserve(), "share_port": True}
    first, client = serve(node, in_process=mode, **there)
    assert client.echo(1) == 1
    first.stop(0.0)
    for next_mode in ("wire", "share", "copy"):
        other = Node()
        server, _ = serve(other, in_process=next_mode, **there)
        value = [next_mode]
        assert client.keep(value) == value
        assert other.kept == value
        assert (other.kept is value) == (next_mode == "share")
        server.stop(0.0)
    assert node.kept is None
