"""Several nodes that do the same, as one: `lp.Pool`."""

import collections
import os
import signal
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from launchpad_lite.testing.programs import call_until_answered

QUICK = lp.RestartPolicy(backoff_s=0.01, max_restarts=50)


class Replica:
    def __init__(self, index: int) -> None:
        self._index = index

    def index(self) -> int:
        return self._index

    def restarts(self) -> tuple[int, int]:
        return self._index, lp.restart_count()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Leaving(Replica):
    """Ends well, once it is told to."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._leaves = False

    def leave(self) -> int:
        self._leaves = True
        return self._index

    def run(self) -> None:
        while not self._leaves and not lp.wait_for_stop(0.01):
            pass


class User:
    """Calls the pool for those who ask."""

    def __init__(self, pool: courier.Pool, other: courier.Pool | None = None) -> None:
        self._pool = pool
        self._other = other

    def turns(self, count: int) -> list[int]:
        return [self._pool.index() for _ in range(count)]

    def homes(self, keys: list[str]) -> list[int]:
        # A call that meets the end of a replica is lost.
        return call_until_answered(lambda: [self._pool.by_key(key).index() for key in keys])

    def all(self) -> list[int]:
        return self._pool.all.index()

    def restarts(self) -> list[tuple[int, int]]:
        # `all` has connections of its own, of which one may still lead to a replica that dies.
        return call_until_answered(self._pool.all.restarts)

    def kill(self, key: str) -> str:
        try:
            self._pool.by_key(key).kill()
        except courier.ServerLostError:
            return "lost"
        return "answered"

    def leave(self, key: str) -> int:
        return int(self._pool.by_key(key).leave())

    def is_one(self) -> bool:
        return self._pool is self._other


def program_of(
    size: int, kind: type[Replica] = Replica, *, choose: Any = "round_robin"
) -> tuple[lp.Program, lp.Pool]:
    program = lp.Program("pool")
    with program.group("replica"):
        handles = [program.add_node(lp.CourierNode(kind, index)) for index in range(size)]
    return program, lp.Pool(handles, choose=choose)


@pytest.mark.parametrize(
    ("launcher", "choose"), [("test_mt", "round_robin"), ("local_mt", "least_loaded")]
)
def test_a_node_calls_the_replicas_in_turns_by_key_and_all(
    launch_program: Any, launcher: str, choose: str
) -> None:
    program, pool = program_of(3, choose=choose)
    program.add_node(lp.CourierNode(User, pool), label="user")
    user = launch_program(program, launcher).client("user")
    assert user.all() == [0, 1, 2]
    poll_until(lambda: collections.Counter(user.turns(30)) == {0: 10, 1: 10, 2: 10}, 20)
    keys = [f"key {number}" for number in range(30)]
    homes = user.homes(keys)
    assert set(homes) == {0, 1, 2}
    assert pool.dereference().by_key(keys[0]).index() == homes[0]


def test_a_pool_that_is_used_twice_in_a_node_is_one_with_edges_to_each_replica(
    launch_program: Any,
) -> None:
    program = lp.Program("pool")
    pool = lp.Pool([program.declare("replica", index) for index in range(3)])
    program.add_node(lp.CourierNode(User, pool, other=pool), label="user")
    for index in range(3):
        program.add_node(lp.CourierNode(Replica, index), label="replica")
    plan = lp.plan(program, "test_mt")
    assert plan.executables[0].calls == ("replica[0]", "replica[1]", "replica[2]")
    assert "calls replica[0], replica[1], replica[2]" in str(plan)
    user = launch_program(program, "test_mt").client("user")
    assert user.is_one()
    assert user.all() == [0, 1, 2]


def test_a_replica_that_comes_back_is_called_again(launch_program: Any) -> None:
    program, pool = program_of(3)
    program.add_node(lp.CourierNode(User, pool), label="user")
    user = launch_program(program, "test_mp", restart={"replica": QUICK}).client("user")
    assert user.all() == [0, 1, 2]
    # A replica that was slow to start is passed over for a moment.
    poll_until(lambda: set(user.turns(3)) == {0, 1, 2}, 20)
    (home,) = user.homes(["x"])
    assert user.kill("x") == "lost"
    assert set(user.turns(6)) >= {0, 1, 2} - {home}
    expected = [(index, int(index == home)) for index in range(3)]
    assert user.restarts() == expected
    poll_until(lambda: user.homes(["x"]) == [home], 20)


def test_the_others_do_the_work_of_a_replica_that_ended_well(launch_program: Any) -> None:
    program, pool = program_of(3, Leaving)
    program.add_node(lp.CourierNode(User, pool), label="user")
    # Who leaves answers first, for which its server has the notice.
    user = launch_program(program, "test_mp", notice_s=30).client("user")
    left = {0, 1, 2} - {user.leave("x")}
    poll_until(lambda: user.homes(["x"])[0] in left, 20)
    # One that was slow to start is passed over for a moment, too.
    poll_until(lambda: set(user.turns(10)) == left, 20)


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_a_node_that_waits_in_a_pool_hears_of_the_stop(launch_program: Any, launcher: str) -> None:
    program, pool = program_of(2)
    program.add_node(lp.CourierNode(Caller, pool), label="caller")
    running = launch_program(program, launcher)
    poll_until(lambda: running.client("caller").calls() > 10, 20)
    assert running.stop().outcome is lp.Outcome.STOPPED


class Caller:
    """Calls for ever, and does not look at the stop."""

    def __init__(self, pool: courier.Pool) -> None:
        self._pool = pool
        self._calls = 0

    def calls(self) -> int:
        return self._calls

    def run(self) -> None:
        while True:
            self._pool.index()
            self._calls += 1


def test_wrong_arguments_are_refused() -> None:
    handle = lp.CourierNode(Replica, 0).create_handle()
    with pytest.raises(ValueError, match="at least one handle"):
        lp.Pool([])
    with pytest.raises(ValueError, match="'random'"):
        lp.Pool([handle], choose="random")  # type: ignore[arg-type]
    things: list[Any] = [
        lp.CourierNode(Replica, 0),
        lp.PyNode(print).create_handle(),
        "127.0.0.1:1",
        lp.Pool([handle]),
    ]
    for thing in things:
        with pytest.raises(TypeError, match=r"lp\.Pool takes handles of nodes"):
            lp.Pool([handle, thing])
    with pytest.raises(TypeError):
        lp.Pool(handle)  # type: ignore[arg-type]
    with pytest.raises(lp.UnresolvedAddressError):
        lp.Pool([handle]).dereference()
