"""The parameter server: values on servers, workers that compute updates, a barrier between steps."""

import asyncio
import collections
import concurrent.futures
import functools
import glob
import json
import os
import pickle
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import courier
import launchpad_lite as lp
from launchpad_lite import engines
from launchpad_lite.engines._servers import (
    Coordinator,
    KeyServer,
    UnknownMemberError,
    WorkerIdentity,
    _Held,
)
from launchpad_lite.engines._user_code import run_user_code
from launchpad_lite.engines._values import added, hash_of
from launchpad_lite.testing import Fault, Monkey, poll_until


class Sum(engines.ParameterServer):
    """Each step adds 1 to each value."""

    def __init__(self, steps: int = 20, barrier: engines.Barrier | None = None) -> None:
        self._steps = steps
        self.barrier = barrier or engines.BSP()

    def initial(self) -> Mapping[Any, Any]:
        return {"a": 0, ("b", 2): np.zeros(3), 7: 0.5}

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return {key: np.ones_like(value) for key, value in values.items()}

    def stop(self) -> bool:
        return self.get("a").version >= self._steps


def run(job: engines.ParameterServer, **options: Any) -> "Seen":
    """Runs it to its end with threads, and returns what was there then."""
    program = lp.Program("ps")
    ended: list[Seen] = []
    ps = job.add_to(program, **{"workers": 4, "progress_s": None, **options})
    program.add_node(lp.PyNode(_look, ps, ended), label="look")
    lp.launch(program, "local_mt").wait()
    return ended[0]


def in_a_node(test: Callable[..., None]) -> Callable[..., None]:
    """Has a test run where it can make servers."""

    @functools.wraps(test)
    def run_test(**arguments: Any) -> None:
        program = lp.Program("servers")
        program.add_node(lp.PyNode(test, **arguments), label="server")
        lp.launch(program, "local_mt").wait()

    return run_test


class Seen:
    """What was there when all workers had left."""

    def __init__(self, ps: engines.ParameterServerClient) -> None:
        poll_until(lambda: ps.progress().updates > 0 and ps.worker_num() == 0)
        self.values = {key: ps.get(key) for key in list(ps.keys())}
        self.progress = ps.progress()


def _look(ps: engines.ParameterServerClient, ended: list[Seen]) -> None:
    ended.append(Seen(ps))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    "barrier",
    [engines.BSP(), engines.SSP(2), engines.ASP(), engines.PSP(2, resample=0.01)],
    ids=str,
)
def test_each_update_is_applied_once_whatever_the_barrier(
    barrier: engines.Barrier, servers: int
) -> None:
    seen = run(Sum(20, barrier), servers=servers)
    updates = seen.progress.updates
    # Those that were on their way when it stopped are applied, too.
    assert 20 <= updates <= 20 + 2 * 4
    a, b, c = (seen.values[key] for key in ("a", ("b", 2), 7))
    assert a.value == a.version == b.version == c.version
    assert updates <= a.value <= updates + 4
    assert b.value.tolist() == [a.value] * 3
    assert c.value == 0.5 + a.value


class Scheduled(engines.ParameterServer):
    """Each worker gets one key, and the servers replace its value."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def initial(self) -> Mapping[Any, Any]:
        return dict.fromkeys(range(4), "")

    def schedule(self, workers: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        return {worker: [int(worker[-2])] for worker in workers}

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return {key: (worker, value) for key, value in values.items()}

    def pull(self, key: Any, value: Any, update: Any) -> Any:
        self._told.append((key, value, update))
        return update[0]

    def stop(self) -> bool:
        self._told.append(self.worker_num())
        return all(self.get(key).value for key in self.keys())


def test_workers_get_what_is_scheduled_for_them_and_pull_decides_the_new_value() -> None:
    told: list[Any] = []
    seen = run(Scheduled(told))
    assert {key: value.value for key, value in seen.values.items()} == {
        number: f"ps_worker[{number}]" for number in range(4)
    }
    assert (2, "", ("ps_worker[2]", "")) in told
    assert {count for count in told if isinstance(count, int)} <= {1, 2, 3, 4}


class Momentum(Sum):
    """A server keeps a number for each value that nobody else sees."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__(steps=5)
        self._told = told

    def initial(self) -> Mapping[Any, Any]:
        return {"a": (0.0, 0.0), 3: (0.0, 0.0)}

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        self._told.extend(values.values())
        return dict.fromkeys(values, 1.0)

    def pull(self, key: Any, value: Any, update: Any) -> Any:
        momentum = value[1] / 2 + update
        return value[0] + momentum, momentum

    def visible(self, key: Any, value: Any) -> Any:
        return value[0]


def test_workers_and_get_see_what_is_visible_of_a_value() -> None:
    told: list[Any] = []
    seen = run(Momentum(told), workers=1, servers=2)
    assert seen.values["a"].value == seen.values[3].value == 1 + 1.5 + 1.75 + 1.875 + 1.9375
    assert set(told) == {0.0, 1.0, 2.5, 4.25, 6.125}


def test_whole_numbers_are_divided_among_the_servers_in_turn() -> None:
    assert [hash_of(key) % 3 for key in range(5)] == [0, 1, 2, 0, 1]
    assert hash_of(-1) % 3 == 2


_SENT: collections.Counter[str] = collections.Counter()


class Counted:
    """A value that knows how often it was sent."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        _SENT[self.name] += 1
        return Counted, (self.name,)


class HalfChanged(Sum):
    def initial(self) -> Mapping[Any, Any]:
        return {"a": 0, "changed": Counted("changed"), "same": Counted("same")}

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        return {"a": 1, "changed": 1}

    def pull(self, key: Any, value: Any, update: Any) -> Any:
        return value if key == "changed" else value + update


def test_a_worker_gets_only_what_has_changed() -> None:
    _SENT.clear()
    run(HalfChanged(40), workers=2)
    assert _SENT["same"] <= 8  # by two workers and one that looks, there and back
    assert _SENT["changed"] >= 20


class Guest:
    """Takes part for some steps, twice."""

    def __init__(self, ps: engines.ParameterServerClient, told: list[Any]) -> None:
        self._ps = ps
        self._told = told

    def run(self) -> None:
        for _ in range(2):
            steps = []
            for step in self._ps.work(Sum(barrier=engines.BSP())):
                steps.append(step)
                if len(steps) == 3:
                    break
            self._told.append(steps)
        poll_until(lambda: self._ps.progress().updates > 100)
        lp.stop()


def test_a_worker_may_come_and_leave_and_begins_where_the_slowest_is() -> None:
    program, told = lp.Program("ps"), []
    ps = Sum(10**9).add_to(program, workers=2, progress_s=None)
    program.add_node(lp.CourierNode(Guest, ps, told), label="guest")
    lp.launch(program, "local_mt").wait()
    first, second = told
    assert [len(first), len(second)] == [3, 3]
    assert second[0] >= first[-1]  # nobody begins again


class Broken(Sum):
    """Fails in the way that it is told."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = way

    def initial(self) -> Any:
        return {"no first": None, "float": {1.5: 0}}.get(self._way, super().initial())

    def stop(self) -> bool:
        if self._way == "lost":
            raise courier.ServerLostError("the evaluator")
        return super().stop()

    def schedule(self, workers: Sequence[str]) -> Any:
        if self._way in ("no plan", "letters", "no keys"):
            keys = {"letters": "a", "no keys": None}.get(self._way)
            return None if self._way == "no plan" else dict.fromkeys(workers, keys)
        if self._way == "schedule":
            return {worker: ["A"] for worker in workers}
        if self._way == "stranger":
            return {"nobody": ["a"]}
        return super().schedule(workers)

    def push(self, worker: str, values: Mapping[Any, Any]) -> Any:
        if self._way == "push":
            raise courier.ServerLostError("another server")
        return {
            "None": None,
            "unscheduled": {"other": 1},
            "text": {"a": "text"},
            "shape": {("b", 2): np.ones((2, 3))},
            "pull": {"a": 1},
        }.get(self._way, {})

    def pull(self, key: Any, value: Any, update: Any) -> Any:
        if self._way == "pull":
            self.set("c", 1)
        return super().pull(key, value, update)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("schedule", r"ps_server\[0\]: schedule: no value of the key 'A'; did you mean 'a'"),
        ("stranger", r"schedule has keys for 'nobody', but was asked for ps_worker"),
        ("None", r"ps_worker\[\d\], step 0: push returned None"),
        ("unscheduled", r"update for the key 'other', which was not scheduled; scheduled were 'a'"),
        ("text", r"update of 'a' that ps_worker\[\d\] made in step 0 cannot be applied: TypeError"),
        ("shape", r"of \('b', 2\) .*: the value has the shape \(3,\), the update \(2, 3\); write"),
        ("pull", r"pull may not call self\.set"),
        ("no first", r"ps_server\[0\]: initial returned None; it is to map keys to values"),
        ("float", r"ps_server\[0\]: initial: a key is text, .*, not 1\.5"),
        ("no plan", r"ps_server\[0\]: schedule returned None; it is to map workers to keys"),
        ("letters", r"schedule of ps_worker\[\d\] returned 'a'; it is to return keys"),
        ("no keys", r"schedule of ps_worker\[\d\] returned None; it is to return keys"),
        ("lost", r"ServerLostError: the evaluator"),
        ("push", r"ServerLostError: another server"),
    ],
)
def test_what_goes_wrong_in_a_step_names_node_step_and_key(way: str, message: str) -> None:
    program = lp.Program("ps")
    Broken(way).add_to(program, workers=2, progress_s=None)
    with pytest.raises(lp.NodeFailedError, match=message):
        lp.launch(program, "local_mt").wait()


@pytest.mark.parametrize(
    "error",
    [
        StopIteration("s"),
        StopAsyncIteration("s"),
        SystemExit("s"),
        KeyboardInterrupt("s"),
        GeneratorExit("s"),
        asyncio.CancelledError("s"),
        concurrent.futures.CancelledError("s"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_end_an_iterator_a_task_or_a_thread_becomes_an_error(
    error: BaseException,
) -> None:
    class Job:
        def push(self, it: object) -> None:
            raise error

    with pytest.raises(
        RuntimeError, match=rf"^node: push raised {type(error).__name__}: s$"
    ) as got:
        run_user_code("node", Job(), "push", None)
    assert got.value.__cause__ is error
    with pytest.raises(KeyError, match="'k'"):
        run_user_code("node", {}, "__getitem__", "k")


def _exit(*_: Any) -> None:
    sys.exit()


class Exiting(Sum):
    """One of its methods ends the process that calls it, or so it thinks."""

    def __init__(self, method: str) -> None:
        super().__init__(barrier=_Exiting() if method == "may_advance" else engines.BSP())
        setattr(self, method, _exit)


class _Exiting(engines.Barrier):
    def may_advance(self, step: int, observed_steps: Sequence[int]) -> bool:
        _exit()


@pytest.mark.parametrize(
    "method", ["initial", "schedule", "stop", "visible", "pull", "may_advance"]
)
def test_a_method_that_exits_on_a_server_is_a_failure(method: str) -> None:
    program = lp.Program("ps")
    Exiting(method).add_to(program, workers=2, progress_s=None)
    name = r"barrier: \w+" if method == "may_advance" else method
    with pytest.raises(lp.NodeFailedError, match=rf"{name} raised SystemExit"):
        lp.launch(program, "local_mt").wait()


class _Picky(engines.Barrier):
    """Fails when there is one other worker left; or when a sample is drawn a second time."""

    def __init__(self, *, samples: bool) -> None:
        if samples:
            self.sample_size, self.resample = 1, 0.01
        self._draws = 0

    def may_advance(self, step: int, observed_steps: Sequence[int]) -> bool:
        if self.sample_size is None and len(observed_steps) == 1:
            raise StopIteration
        return False

    def sample(self, others: Sequence[Any], rng: Any) -> list[Any]:
        self._draws += 1
        if self._draws > 1:
            raise StopIteration
        return list(others[:1])


@pytest.mark.parametrize("samples", [False, True])
@in_a_node
def test_who_waits_gets_what_the_barrier_raises_when_nobody_calls(samples: bool) -> None:
    coordinator = Coordinator(Sum(barrier=_Picky(samples=samples)), [None], None)
    with courier.Server(coordinator, in_process="wire") as server:
        client = courier.Client(server.address)
        client.begin()
        streams = [iter(client.stay(f"worker[{n}]", 0, None, None)) for n in range(3)]
        members = [next(stream)[0] for stream in streams]
        call = client.futures.advance(members[0], 1, {}, {}, "")
        if not samples:
            poll_until(lambda: client.progress().waiting == 1)
            streams[2].close()
        with pytest.raises(RuntimeError, match=r"barrier: \w+ raised StopIteration"):
            call.result(30)
        with pytest.raises(RuntimeError, match=r"barrier: \w+ raised StopIteration"):
            client.advance(members[1], 1, {}, {}, "")
        for stream in streams:
            stream.close()


@pytest.mark.parametrize(
    ("value", "update"), [(np.zeros((3, 3)), np.ones(3)), (np.zeros(3), 1), (0.5, np.ones(1))]
)
def test_an_update_is_added_to_a_value_of_its_shape_only(value: Any, update: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the value has the shape \(.*\), the update \(.*\); write"
    ):
        added(value, update)
    assert added(value, value) is not value
    assert (added(1, np.float64(2)), added((1,), (2,)), added("a", "b")) == (3, (1, 2), "ab")


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda p: engines.ParameterServer().add_to(p, workers=1), "has no push"),
        (lambda p: Sum().add_to(p, workers=-1), "at least 1 server and 0 workers, not 1 and -1"),
        (lambda p: Sum().add_to(p, workers=1, servers=0), "at least 1 server"),
        (lambda p: Sum().add_to(p, workers=1, progress_s=0), "progress_s is above 0, or None"),
        (lambda p: Sum(barrier=engines.BSP).add_to(p, workers=1), "an object, as BSP"),  # type: ignore[arg-type]
        (lambda p: [Sum().add_to(p, workers=1) for _ in range(2)], "give another label="),
        (lambda p: Sum().get("a"), r"add_to\(program\) puts it there"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    add: Callable[[lp.Program], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        add(lp.Program("ps"))


def test_keys_are_of_types_that_are_the_same_everywhere() -> None:
    program = lp.Program("ps")
    ps = Sum(10**9).add_to(program, workers=1, progress_s=None)
    running = lp.launch(program, "local_mt")
    client = ps.dereference()
    with pytest.raises(TypeError, match="bytes or a tuple of these, not"):
        client.set(np.str_("a"), 1)
    with pytest.raises(TypeError, match="bytes or a tuple of these, not 1"):
        client.set(1.5, 1)  # type: ignore[arg-type]
    with pytest.raises(engines.UnknownKeyError, match="no value of the key 'aa'; did you mean 'a'"):
        client.get("aa")
    client.set("aa", 1)
    assert client.get("aa").value >= 1  # the worker may have added to it already
    running.stop()
    running.wait()


@in_a_node
def test_a_value_of_another_server_is_new_even_if_its_version_is_the_same() -> None:
    before, after = (KeyServer(Sum(), [None]) for _ in range(2))
    before.put({"a": "before"})
    after.put({"a": "after"})
    life, changed = before.read({"a": -1})
    assert changed == [("a", 0, "before")]
    assert before.read({"a": 0}, life) == (life, [])
    assert after.read({"a": 0}, life)[1] == [("a", 0, "after")]


class Waiting(Sum):
    """Has a slow `pull`."""

    def __init__(self, begun: threading.Event, goes_on: threading.Event) -> None:
        super().__init__()
        self._begun = begun
        self._goes_on = goes_on

    def pull(self, key: Any, value: Any, update: Any) -> Any:
        self._begun.set()
        assert self._goes_on.wait(30)
        return super().pull(key, value, update)


@in_a_node
def test_reads_go_on_while_more_wait_for_a_slow_pull_than_there_are_handler_threads() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    values = KeyServer(Waiting(begun, goes_on), [None])
    with courier.Server(values, in_process="wire", thread_pool_size=2) as server:
        client = courier.Client(server.address)
        client.put({"a": 0, "b": 0})
        updates = [
            client.futures.update(
                WorkerIdentity(f"worker[{number}]", 0, number), 0, {"ab"[number % 2]: 1}
            )
            for number in range(10)
        ]
        assert begun.wait(30)
        _, changed = courier.with_timeout(client, 10).read({"a": -1, "b": -1})
        assert changed == [("a", 0, 0), ("b", 0, 0)]
        goes_on.set()
        for update in updates:
            update.result(30)
        assert client.read({"a": -1, "b": -1})[1] == [("a", 5, 5), ("b", 5, 5)]


@in_a_node
def test_a_worker_keeps_its_name_though_its_old_stream_has_not_ended() -> None:
    coordinator = Coordinator(Sum(), [None], None)
    with courier.Server(coordinator, in_process="wire") as server:
        client = courier.Client(server.address)

        def joined(*args: Any) -> tuple[Any, WorkerIdentity]:
            stream = iter(client.stay("worker[0]", *args))
            return stream, next(stream)[0]

        first, member = joined(0, None, None)
        other, another = joined(0, None, None)
        assert [member.name, another.name] == ["worker[0]", "worker[0]#2"]
        again, later = joined(0, member, 5)
        assert later.name == "worker[0]"
        assert later > member
        assert list(first) == []
        with pytest.raises(UnknownMemberError):
            client.advance(member, 5, {}, {}, "")
        assert client.worker_num() == 2
        # In a new process of the node, the streams of the old one count no more.
        last, restarted = joined(1, None, None)
        assert restarted.name == "worker[0]"
        assert list(again) == list(other) == []
        assert client.worker_num() == 1
        last.close()


@in_a_node
def test_an_update_is_applied_once_and_those_of_workers_that_have_left_are_forgotten() -> None:
    server = KeyServer(Sum(), [None])
    server.put({"a": 0})
    for number in range(100):
        for step in (0, 0, 1, 0, 1):
            server.update(WorkerIdentity("worker[0]", 7, number), step, {"a": 1}).result()
    assert server.read({"a": -1})[1] == [("a", 200, 200)]
    # Which updates it had sent is not known any more.
    late = server.update(WorkerIdentity("worker[0]", 7, 50), 9, {"a": 1})
    assert isinstance(late.exception(), UnknownMemberError)
    server.update(WorkerIdentity("worker[0]", 8, 0), 0, {"a": 1}).result()
    assert server.read({"a": -1})[1] == [("a", 201, 201)]
    assert list(server._applied) == ["worker[0]"]


@in_a_node
def test_one_call_ends_a_step_and_begins_the_next_and_may_be_repeated() -> None:
    coordinator = Coordinator(Sum(), [None], None)
    with courier.Server(coordinator, in_process="wire") as server:
        client = courier.Client(server.address)
        client.begin()
        stream = iter(client.stay("worker[0]", 0, None, None))
        member, _ = next(stream)
        first = client.advance(member, 0, {}, {}, "")
        assert (first.keys, first.changed) == (["a", ("b", 2), 7], [])  # it may need none
        for _ in range(3):
            start = client.advance(member, 1, {"a": 1}, {"a": 0, 7: 0}, first.life)
            assert start.changed == [("a", 1, 1)]
        assert client.progress().updates == 1
        stream.close()


class Leaving(Sum):
    """Ends the program while its update has not been sent."""

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        lp.stop()
        assert lp.stop_event().wait(30)
        return {"a": 1}


def test_the_update_of_a_worker_that_is_stopped_is_applied(tmp_path: Path) -> None:
    program = lp.Program("ps")
    Leaving().add_to(program, workers=1, progress_s=None)
    lp.launch(program, "test_mt", checkpoints={"ps_server": tmp_path}).wait()
    newest = max(tmp_path.rglob("values.pickle"))
    assert pickle.loads(newest.read_bytes())["values"]["a"] == (1, 1)


def _wait_for_stop(ps: engines.ParameterServerClient, folder: Path) -> None:
    poll_until(lambda: (folder / "stop").exists() and ps.worker_num() == 0, timeout_s=60)
    values = {key: ps.get(key).value for key in list(ps.keys())}
    (folder / "values.json").write_text(json.dumps(values))


class Logged(engines.ParameterServer):
    """Values are lists of updates, each of which occurs once."""

    def __init__(self, folder: Path, barrier: engines.Barrier) -> None:
        self._folder = folder
        self.barrier = barrier

    def initial(self) -> Mapping[Any, Any]:
        return {"one": (), "two": (), "three": ()}

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        time.sleep(0.005)
        update = uuid.uuid4().hex
        with (self._folder / f"{os.getpid()}.log").open("a") as log:
            log.write(f"{update}\n")
        return dict.fromkeys(values, (update,))

    def stop(self) -> bool:
        return (self._folder / "stop").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("barrier", "victims"),
    [
        (engines.BSP(), ["ps_worker", "ps_server"]),
        (engines.PSP(2, 1, resample=0.05), ["ps_worker"]),
        (engines.PSP(2, 1, resample=0.05), ["ps_server"]),
    ],
    ids=str,
)
def test_nodes_are_killed_at_random_and_no_update_is_applied_twice(
    barrier: engines.Barrier, victims: list[str], tmp_path: Path
) -> None:
    program = lp.Program("ps")
    ps = Logged(tmp_path, barrier).add_to(program, workers=4, servers=2, progress_s=None)
    program.add_node(lp.PyNode(_wait_for_stop, ps, tmp_path), label="end")
    running = lp.launch(
        program,
        "test_mp",
        restart=lp.RestartPolicy("on_failure", max_restarts=100, max_backoff_s=0.2),
        checkpoints={"ps_server": lp.Checkpoints(tmp_path / "checkpoints", period_s=0.1)},
    )
    found = f"{tmp_path}/checkpoints/**/values.pickle"
    poll_until(lambda: glob.glob(found, recursive=True))  # noqa: PTH207 - Path's fails if a folder goes
    faults = (Fault.KILL,)
    with Monkey(running, seed=1, faults=faults, labels=victims, mean_interval_s=0.3) as monkey:
        poll_until(lambda: len(monkey.injected) >= 8, timeout_s=60)
    # The barrier is not stuck: workers that are all there again go on.
    client = ps.dereference()
    poll_until(lambda: client.worker_num() == 4)
    # Steps, because a server that comes back counts updates from 0.
    before = client.progress().fastest
    poll_until(lambda: client.progress().fastest > before + 10)
    (tmp_path / "stop").touch()
    running.wait()
    sent = {line for log in tmp_path.glob("*.log") for line in log.read_text().split()}
    for updates in json.loads((tmp_path / "values.json").read_text()).values():
        assert len(set(updates)) == len(updates)
        assert set(updates) <= sent
        if victims == ["ps_worker"]:
            # Of each worker that was killed one step, at most, did not get through.
            assert len(sent) - len(updates) <= len(monkey.injected)


@pytest.mark.slow
def test_a_stopped_worker_holds_the_others_up_no_longer_than_liveness_allows() -> None:
    program = lp.Program("ps")
    ps = Slow(10**9).add_to(program, workers=3, progress_s=None)
    running = lp.launch(
        program,
        "test_mp",
        restart={"ps_worker": "on_failure"},
        liveness={"ps_worker": lp.Liveness(health_s=2)},
    )
    client = ps.dereference()
    poll_until(lambda: client.progress().slowest > 3)
    [pid] = [node.pid for node in running.status() if node.name == "ps_worker[1]"]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    poll_until(lambda: client.progress().waiting == 2)
    before = client.progress().fastest
    poll_until(lambda: client.progress().slowest > before + 3 and client.worker_num() == 3)
    running.stop()


class Crashing(Sum):
    def pull(self, key: Any, value: Any, update: Any) -> Any:
        if lp.restart_count() == 0 and np.max(value) > 2:
            os._exit(1)
        return super().pull(key, value, update)


class Timed(Sum):
    """Ends by itself; what decides has its node, whoever asks it."""

    barrier = engines.PSP(1, resample=0.02)

    def __init__(self) -> None: ...

    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        time.sleep(0.05 if worker.endswith("[0]") else 0.0)
        return super().push(worker, values)

    def stop(self) -> bool:
        assert lp.current_node().name == "ps_server[0]"
        return self.get("a").version >= 30


def test_code_that_runs_when_a_sample_is_drawn_again_has_its_node() -> None:
    assert run(Timed(), workers=3)


@pytest.mark.slow
def test_a_server_that_ends_before_its_first_checkpoint_is_due_has_the_first_values(
    tmp_path: Path,
) -> None:
    program = lp.Program("ps")
    Crashing().add_to(program, workers=2, servers=2, progress_s=None)
    running = lp.launch(
        program,
        "test_mp",
        restart={"ps_server": "on_failure"},
        checkpoints={"ps_server": lp.Checkpoints(tmp_path, period_s=3600)},
    )
    assert running.wait().outcome is lp.Outcome.COMPLETED


@pytest.mark.slow
def test_a_server_without_checkpoints_that_comes_back_says_that_its_values_are_lost() -> None:
    program = lp.Program("ps")
    Crashing().add_to(program, workers=1, progress_s=None)
    with pytest.raises(lp.NodeFailedError, match="its values are lost: launch with checkpoints="):
        lp.launch(program, "test_mp", restart={"ps_server": "on_failure"}).wait()


@pytest.mark.slow
def test_a_second_launch_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    values = []
    for number in range(2):
        program = lp.Program("ps")
        ps = Slow(30 * (number + 1)).add_to(program, workers=2, servers=2, progress_s=None)
        program.add_node(lp.PyNode(_note, ps, tmp_path), label="note")
        lp.launch(program, "test_mp", checkpoints={"ps_server": tmp_path / "state"}).wait()
        values.append(json.loads((tmp_path / "note.json").read_text()))
    (first, first_step), (second, second_step) = values
    assert 30 <= first <= 36
    assert 60 <= second <= 66
    assert second_step > first_step


@pytest.mark.parametrize("servers", [1, 3])
def test_checkpoints_of_another_number_of_servers_are_an_error_that_names_both(
    servers: int, tmp_path: Path
) -> None:
    for number in (2, servers):
        program = lp.Program("ps")
        Sum().add_to(program, workers=1, servers=number, progress_s=None)
        running = lp.launch(program, "test_mt", checkpoints={"ps_server": tmp_path})
        if number == 2:
            running.wait()
    message = rf"is of 2 servers, and the program has {servers}\. Launch with .*servers=2"
    with pytest.raises(lp.NodeFailedError, match=message):
        running.wait()


class Slow(Sum):
    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        time.sleep(0.02)  # long enough for those who look
        return super().push(worker, values)


def _note(ps: engines.ParameterServerClient, folder: Path) -> None:
    step = 0

    def ended() -> bool:
        nonlocal step
        progress = ps.progress()
        step = max(step, progress.fastest)
        return progress.updates > 0 and not progress.workers

    poll_until(ended)
    (folder / "note.json").write_text(json.dumps([int(ps.get("a").value), step]))


class Hanging(Sum):
    def push(self, worker: str, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        if worker == "ps_worker[1]":
            time.sleep(60)
        return super().push(worker, values)


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_keep_the_values_from_being_saved(tmp_path: Path) -> None:
    program = lp.Program("ps")
    ps = Hanging(10**9).add_to(program, workers=2, progress_s=None)
    running = lp.launch(
        program, "test_mp", notice_s=2, checkpoints={"ps_server": tmp_path / "state"}
    )
    client = ps.dereference()
    poll_until(lambda: client.progress().waiting == 1)
    running.stop()
    assert list((tmp_path / "state").rglob("values.pickle"))


def test_a_value_that_is_shared_by_two_readers_at_the_same_time_is_wrapped_once() -> None:
    class Large:
        held: _Held

        @property
        def nbytes(self) -> int:
            if not hasattr(self, "_was_asked"):
                self._was_asked = True
                self.held.sent()  # as another thread would, meanwhile
            return 1 << 24

    value = Large()
    value.held = _Held(value, value, 0)
    assert value.held.sent() is value
    assert value.held.sent().value is value
