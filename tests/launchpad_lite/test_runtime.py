"""What a node can reach of its program, and stop handlers."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

import launchpad_lite as lp
from courier import Secret
from launchpad_lite._address import AddressTable
from launchpad_lite._runtime import NodeRuntime, NodeSetup
from launchpad_lite._stop_handlers import StopHandlers
from launchpad_lite._worker import run_node
from launchpad_lite.testing import poll_until


class FakeLink:
    def __init__(self) -> None:
        self.stops = 0
        self.runs: list[bool] = []
        self.heartbeats = 0
        self.listens: bool | None = None

    def constructed(self, runs: bool) -> None:
        self.runs.append(runs)

    def ask_stop(self) -> None:
        self.stops += 1

    def heard(self, listens: bool) -> None:
        self.listens = listens  # what was said last

    def leaving(self) -> None: ...

    def healthy(self) -> None: ...

    def heartbeat(self) -> None:
        self.heartbeats += 1


def make_runtime(name: str = "node") -> tuple[NodeRuntime, FakeLink]:
    link = FakeLink()
    table = AddressTable({}, Secret.generate())
    return NodeRuntime(NodeSetup("program", name, 0, notice_s=1.0), table, link), link


class Do:
    """Work that calls a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def thaw(self) -> Any:
        return self

    def __call__(self, runtime: NodeRuntime) -> None:
        self.function()


def in_thread(function: Callable[[], Any]) -> Any:
    """Returns what a function returns or raises in a thread without a context."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(function())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            result.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    return result[0]


@pytest.mark.parametrize("ask", [lp.stop, lp.stop_event, lambda: lp.wait_for_stop(0.0)])
def test_outside_of_a_program_there_is_nothing_to_stop(ask: Callable[[], Any]) -> None:
    with pytest.raises(lp.NoProgramError, match="no program runs"):
        ask()


def test_a_node_asks_for_the_stop_and_sees_its_own() -> None:
    runtime, link = make_runtime()
    seen: list[bool] = []

    def work() -> None:
        seen.append(lp.wait_for_stop(0.0))
        lp.stop()
        lp.stop()
        runtime.request_stop()
        seen.append(lp.wait_for_stop())
        seen.append(lp.stop_event() is runtime.stop_event)

    assert in_thread(lambda: run_node(Do(work), runtime)) is None
    assert seen == [False, True, True]
    assert link.stops == 2


def test_a_thread_of_the_only_program_belongs_to_it() -> None:
    runtime, link = make_runtime()
    run_node_in_thread = lambda: run_node(Do(lambda: in_thread(lp.stop)), runtime)
    assert in_thread(run_node_in_thread) is None
    assert link.stops == 1
    with pytest.raises(lp.NoProgramError):
        lp.stop()


def test_a_thread_beside_two_programs_belongs_to_neither() -> None:
    (first, first_link), (second, _) = make_runtime("a"), make_runtime("b")

    def work() -> None:
        lp.stop()
        raise in_thread(lp.stop)

    def outer() -> None:
        report = in_thread(lambda: run_node(Do(work), first))
        assert "several programs" in report.message

    assert in_thread(lambda: run_node(Do(outer), second)) is None
    assert first_link.stops == 1


@pytest.mark.parametrize(
    ("error", "stopped", "failed"),
    [
        (SystemExit(0), False, False),
        (SystemExit(), False, False),
        (SystemExit(3), False, True),
        (SystemExit(3), True, False),
        (SystemExit("message"), False, True),
        (KeyboardInterrupt(), False, True),
        (ValueError("x"), False, True),
        (ValueError("x"), True, True),
    ],
)
def test_how_a_node_ends(error: BaseException, stopped: bool, failed: bool) -> None:
    runtime, _ = make_runtime()

    def work() -> None:
        if stopped:
            runtime.request_stop()
        raise error

    report = in_thread(lambda: run_node(Do(work), runtime))
    assert (report is not None) is failed


# Stop handlers


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


def test_unknown_handlers_are_ignored_and_what_cannot_be_called_is_refused() -> None:
    lp.unregister_stop_handler(print)
    with pytest.raises(TypeError, match="cannot"):
        lp.register_stop_handler(None)  # type: ignore[arg-type]


def test_handlers_registered_anywhere_are_called_when_a_program_of_threads_stops(
    launch_program: Any,
) -> None:
    called: list[str] = []

    def register(name: str) -> None:
        lp.register_stop_handler(lambda: called.append(name))

    class Registering:
        def run(self) -> None:
            in_thread(lambda: register("thread of a node"))
            register("node")
            lp.stop()
            lp.wait_for_stop()

    done = threading.Event()
    lp.register_stop_handler(done.set)  # the first is called last
    program = lp.Program("handlers")
    program.add_node(lp.PyClassNode(Registering), label="a")
    launch_program(program, "local_mt").wait()
    assert done.wait(30)
    # The node's own are called in another thread, for which its end waits two seconds only.
    poll_until(lambda: len(called) == 2)
    assert called == ["node", "thread of a node"]


def test_a_node_that_was_asked_while_it_was_constructed_tells_again_whether_it_listens() -> None:
    runtime, link = make_runtime()
    with runtime.active():
        runtime.request_stop()
        assert link.listens  # it may yet look
        runtime.constructed(runs=True)
        assert not link.listens
        assert lp.stop_event().is_set()
        assert link.listens
