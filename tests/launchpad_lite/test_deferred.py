"""Arguments that are constructed in the node: `lp.Deferred`."""

import dataclasses
import sys
import threading
from typing import Any

import pytest

import courier
import launchpad_lite as lp

#: With copies of what is shared by threads, and without.
LAUNCHERS = ["test_mt", "local_mt"]


class Locked:
    """Cannot be pickled; counts how many there are in this process."""

    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lock = threading.Lock()
        self.args = args
        self.kwargs = kwargs
        type(self).made += 1


@dataclasses.dataclass
class Config:
    content: Any
    names: list[Any] = dataclasses.field(default_factory=list)


class Server:
    def ping(self) -> str:
        return "pong"


class Probe:
    """Tells what it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._args = args
        self._kwargs = kwargs

    def kinds(self) -> list[str]:
        return [type(each).__name__ for each in self._args]

    def is_same(self) -> bool:
        first, second, outer = self._args
        return first is second.content is second.names[0] is outer.args[0]

    def ping(self) -> list[str]:
        """Calls what is in a Deferred: an argument, one by name, in a dataclass, in a list."""
        made: Locked = self._kwargs["locked"]
        direct, config = made.args
        return [each.ping() for each in (direct, config.content, config.names[0])] + [
            each.ping() for each in made.kwargs["more"]
        ]


def fail(text: str) -> None:
    raise LookupError(text)


def probe_of(launch_program: Any, launcher: str, *args: Any, **kwargs: Any) -> Any:
    program = lp.Program("deferred")
    program.add_node(lp.CourierNode(Probe, *args, **kwargs), label="probe")
    return launch_program(program, launcher).client("probe")


@pytest.mark.parametrize("launcher", [*LAUNCHERS, "test_mp"])
def test_what_cannot_be_pickled_is_made_in_the_node(launch_program: Any, launcher: str) -> None:
    Locked.made = 0
    deferred = lp.Deferred(Locked, 1, key=2)
    text = "local"
    local = lp.Deferred(lambda: [text])
    probe = probe_of(launch_program, launcher, deferred, lp.Deferred(threading.Event), local)
    assert probe.kinds() == ["Locked", "Event", "list"]
    assert Locked.made == (launcher != "test_mp")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_that_is_used_twice_in_a_node_is_one_object(launch_program: Any, launcher: str) -> None:
    shared = [threading.Lock()] if launcher == "local_mt" else []
    deferred = lp.Deferred(Locked, *shared)
    things = (deferred, Config(deferred, [deferred]), lp.Deferred(Locked, deferred))
    assert probe_of(launch_program, launcher, *things).is_same()


def test_two_nodes_have_objects_of_their_own_even_in_one_process(launch_program: Any) -> None:
    Locked.made = 0
    deferred = lp.Deferred(Locked)
    program = lp.Program("deferred")
    for label in ("a", "b"):
        program.add_node(lp.CourierNode(Probe, deferred), label=label)
    running = launch_program(program, "test_mt")
    for label in ("a", "b"):
        assert running.client(label).kinds() == ["Locked"]
    assert Locked.made == 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_handles_in_its_arguments_become_clients_and_edges(
    launch_program: Any, launcher: str
) -> None:
    program = lp.Program("deferred")
    first, second, third, fourth = (
        program.add_node(lp.CourierNode(Server), label=label) for label in "abcd"
    )
    deferred = lp.Deferred(Locked, first, Config(second, [third]), more=(fourth, first))
    program.add_node(lp.CourierNode(Probe, locked=deferred), label="probe")
    plan = lp.plan(program, launcher)
    assert sorted(plan.executables[-1].calls) == ["a[0]", "b[0]", "c[0]", "d[0]"]
    assert launch_program(program, launcher).client("probe").ping() == ["pong"] * 5


@pytest.mark.parametrize(("launcher", "deep"), [("test_mp", False), ("local_mt", True)])
def test_the_error_of_its_constructor_is_the_failure_of_the_node(
    launch_program: Any, launcher: str, deep: bool
) -> None:
    deferred: Any = lp.Deferred(fail, "no such environment")
    program = lp.Program("deferred")
    argument = lp.Deferred(Locked, [deferred]) if deep else deferred
    program.add_node(lp.CourierNode(Probe, argument), label="probe")
    with pytest.raises(lp.NodeFailedError, match=r"probe\[0\].*no such environment") as caught:
        launch_program(program, launcher).wait()
    if sys.version_info >= (3, 11):
        told = "".join(str(caught.value) + (courier.remote_traceback(caught.value) or ""))
        told += "".join(str(cause) for cause in [caught.value.__cause__])
        assert "lp.Deferred(fail)" in told


def test_it_is_constructed_once_here_too_if_it_is_asked_for() -> None:
    deferred = lp.Deferred(Locked, lp.Deferred(dict, a=1))
    made = deferred.dereference()
    assert made.args == ({"a": 1},)
    assert repr(deferred) == "Deferred(Locked)"
    with pytest.raises(TypeError, match="cannot be called"):
        lp.Deferred(5)  # type: ignore[arg-type]
    assert deferred.dereference() is made is lp.maybe_dereference(deferred)
    assert lp.maybe_dereference(made) is made
    assert lp.maybe_dereference(None) is None
    program = lp.make_program(lp.CourierNode(Probe, deferred))
    assert lp.plan(program, "test_mp").executables


def test_one_with_a_handle_is_that_of_the_program_that_runs() -> None:
    program = lp.Program("twice")
    server = program.add_node(lp.CourierNode(Server), label="server")
    deferred = lp.Deferred(Locked, server)
    for _ in range(2):
        with lp.launch(program, "test_mt"):
            assert deferred.dereference().args[0].ping() == "pong"


def test_a_handle_in_it_is_not_dereferenced_before_the_launch() -> None:
    handle = lp.CourierNode(Server).create_handle()
    for thing in (handle, lp.Deferred(Locked, handle)):
        with pytest.raises(lp.UnresolvedAddressError):
            lp.maybe_dereference(thing)
