"""What a node can reach of its program: its stop, and handlers of it."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.testing import poll_until


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


def launch_function(launch_program: Any, function: Callable[[], Any]) -> Any:
    program = lp.Program("function")
    program.add_node(lp.PyNode(function), label="node")
    return launch_program(program, "local_mt")


@pytest.mark.parametrize("ask", [lp.stop, lp.stop_event, lambda: lp.wait_for_stop(0.0)])
def test_outside_of_a_program_there_is_nothing_to_stop(ask: Callable[[], Any]) -> None:
    with pytest.raises(lp.NoProgramError, match="no program runs"):
        ask()


def test_a_node_asks_for_the_stop_and_sees_its_own(launch_program: Any) -> None:
    def work() -> None:
        assert not lp.wait_for_stop(0.0)
        assert not lp.wait_for_stop(timeout_secs=0.0)  # as Launchpad's programs have it
        with pytest.raises(TypeError, match="timeout_secs is the original's name of timeout_s"):
            lp.wait_for_stop(0.0, timeout_secs=0.0)
        lp.stop()
        lp.stop()
        assert lp.wait_for_stop()
        assert lp.stop_event().is_set()

    assert launch_function(launch_program, work).wait().outcome is lp.Outcome.STOPPED


def test_a_thread_beside_two_programs_belongs_to_neither(launch_program: Any) -> None:
    other = launch_function(launch_program, lp.wait_for_stop)

    def work() -> None:
        raise in_thread(lp.stop)

    with pytest.raises(lp.NodeFailedError, match="several programs"):
        launch_function(launch_program, work).wait()
    assert other.stop().outcome is lp.Outcome.STOPPED


@pytest.mark.parametrize(
    ("error", "stopped", "failed"),
    [
        (SystemExit(), False, False),
        (SystemExit(3), False, True),
        (SystemExit(3), True, False),
        (SystemExit("message"), False, True),
        (KeyboardInterrupt(), False, True),
        (ValueError("x"), True, True),
    ],
)
def test_how_a_node_ends(
    launch_program: Any, error: BaseException, stopped: bool, failed: bool
) -> None:
    def work() -> None:
        if stopped:
            lp.stop()
            lp.wait_for_stop()
        raise error

    running = launch_function(launch_program, work)
    with pytest.raises(lp.NodeFailedError) if failed else contextlib.nullcontext():
        running.wait()


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


def call_handlers(launch_program: Any, *handlers: Callable[..., Any]) -> None:
    """Runs a node that registers handlers and stops, and that ends when they have returned."""
    done = threading.Event()

    def work() -> None:
        for handler in (done.set, *handlers):
            lp.register_stop_handler(handler)
        lp.stop()
        lp.stop()
        assert done.wait(30)

    launch_function(launch_program, work).wait()


def test_handlers_are_called_once_the_last_one_first_with_what_they_take(
    launch_program: Any,
) -> None:
    calls: list[Any] = []
    call_handlers(
        launch_program,
        lambda signum, frame: calls.append((signum, frame)),
        lambda: calls.append("none"),
        lambda *args: calls.append(args),
        lambda signum=1, frame=2: calls.append(("defaults", signum, frame)),
        calls.clear,  # a builtin, without arguments
    )
    assert calls == [("defaults", 15, None), (15, None), "none", (15, None)]


def test_a_failing_handler_is_called_once_and_does_not_stop_the_others(
    launch_program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    def failing(signum: int, frame: Any) -> None:
        calls.append(signum)
        raise TypeError("mine")  # as if it took no arguments

    call_handlers(launch_program, lambda: calls.append("first"), failing)
    assert calls == [15, "first"]
    assert "failing" in caplog.text


def test_a_handler_may_register_and_unregister_others(launch_program: Any) -> None:
    calls: list[str] = []

    def gone() -> None:
        calls.append("gone")

    def first() -> None:
        lp.unregister_stop_handler(gone)
        lp.register_stop_handler(lambda: calls.append("late"))

    call_handlers(launch_program, gone, first)
    assert calls == ["late"]


class Introspective:
    def ask(self) -> Any:
        return lp.current_node()


@pytest.mark.parametrize("launcher", ["test_mp", "local_mt"])
def test_a_node_knows_its_name_and_has_a_seed_of_its_own(
    launch_program: Any, launcher: str
) -> None:
    def nodes(seed: int) -> list[Any]:
        program = lp.Program("names")
        with program.group("actor"):
            handles = [program.add_node(lp.CourierNode(Introspective)) for _ in range(2)]
        running = launch_program(program, launcher, seed=seed)
        found = [handle.dereference().ask() for handle in handles]
        running.stop()
        return found

    first, second = nodes(7)
    assert (first.name, first.label, first.replica) == ("actor[0]", "actor", 0)
    assert (second.name, second.program) == ("actor[1]", "names")
    assert 0 <= first.seed < 1 << 32
    assert first.seed != second.seed
    assert nodes(7) == [first, second]
    assert nodes(8)[0].seed != first.seed
    with pytest.raises(lp.NoProgramError):
        lp.current_node()


class Registry:
    def __init__(self) -> None:
        self._members: list[Any] = []

    def register(self, **members: Any) -> list[str]:
        self._members += members.values()
        return [member.ask().name for member in self._members]


@pytest.mark.parametrize("launcher", ["test_mp", "local_mt"])
def test_a_handle_in_a_call_becomes_a_client(launch_program: Any, launcher: str) -> None:
    program = lp.Program("handles")
    registry = program.add_node(lp.CourierNode(Registry), label="registry")
    late = program.declare("member")
    member = program.add_node(lp.CourierNode(Introspective), label="member")
    launch_program(program, launcher)
    names = registry.dereference().register(member=member, late=late)
    assert names == ["member[0]", "member[0]"]
