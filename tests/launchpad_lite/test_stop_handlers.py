"""Stop handlers, and what the supervisor hears of a node that is asked to stop."""

from collections.abc import Callable
from typing import Any

import pytest

import launchpad_lite as lp
from courier import Secret
from launchpad_lite._address import AddressTable
from launchpad_lite._runtime import NodeRuntime, NodeSetup
from launchpad_lite._stop_handlers import StopHandlers


class FakeLink:
    """Keeps what was said last."""

    listens: bool | None = None

    def constructed(self, runs: bool) -> None: ...

    def ask_stop(self) -> None: ...

    def stop_received(self, listens: bool) -> None:
        self.listens = listens

    def leaving(self) -> None: ...

    def healthy(self) -> None: ...

    def heartbeat(self) -> None: ...


@pytest.fixture
def handlers() -> StopHandlers:
    return StopHandlers()


def test_handlers_are_called_once_the_last_one_first_with_what_they_take(
    handlers: StopHandlers,
) -> None:
    calls: list[Any] = []
    functions: list[Callable[..., Any]] = [
        lambda signum, frame: calls.append((signum, frame)),
        lambda: calls.append("none"),
        lambda *args: calls.append(args),
        lambda signum=1, frame=2: calls.append(("defaults", signum, frame)),
        calls.clear,  # a builtin, without arguments
    ]
    for function in functions:
        handlers.add(function, catch_signals=False)
    handlers.call_all(15, None)
    handlers.call_all(15, None)
    assert calls == [("defaults", 15, None), (15, None), "none", (15, None)]


def test_a_failing_handler_is_called_once_and_does_not_stop_the_others(
    handlers: StopHandlers, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def failing(signum: int, frame: Any) -> None:
        calls.append(signum)
        raise TypeError("mine")  # as if it took no arguments

    def leaving() -> None:
        raise SystemExit(1)

    for handler in (lambda: calls.append("first"), failing, leaving):
        handlers.add(handler, catch_signals=False)
    with pytest.raises(SystemExit):
        handlers.call_all()
    assert calls == [15, "first"]
    assert "failing" in caplog.text


def test_a_handler_may_register_and_unregister_others(handlers: StopHandlers) -> None:
    calls: list[str] = []

    def late() -> None:
        calls.append("late")

    def gone() -> None:
        calls.append("gone")

    def first() -> None:
        handlers.add(late, catch_signals=False)
        handlers.remove(gone)

    handlers.add(gone, catch_signals=False)
    handlers.add(first, catch_signals=False)
    handlers.call_all()
    assert calls == ["late"]


def test_a_node_that_was_asked_while_it_was_constructed_tells_again_whether_it_listens() -> None:
    link = FakeLink()
    setup = NodeSetup("program", "node", 0, notice_s=1.0)
    runtime = NodeRuntime(setup, AddressTable({}, Secret.generate()), link)
    with runtime.active():
        runtime.request_stop()
        assert link.listens  # it may yet look
        runtime.constructed(runs=True)
        assert not link.listens
        assert lp.stop_event().is_set()
        assert link.listens
