"""Peer-to-peer: every peer holds some values and computes updates; nobody knows everything."""

import collections
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite import engines
from launchpad_lite.engines import _peer, peer_to_peer
from launchpad_lite.engines._member import CIRCLE, SUCCESSORS, Contact, Ring
from launchpad_lite.engines._peer import PATIENCE_S
from launchpad_lite.testing import poll_until


def test_a_search_goes_around_peers_that_do_not_answer() -> None:
    contacts = [Contact(f"peer[{number}]") for number in range(100)]
    me, *others = sorted(contacts, key=lambda contact: contact.place)
    ring = Ring(me)
    ring.follow(others)
    place, gone = (me.place + CIRCLE // 2) % CIRCLE, set[str]()
    for expected in reversed(others[SUCCESSORS - 3 : SUCCESSORS]):
        assert ring.next_hop(place, gone) == expected
        gone.add(expected.name)


class Counting(engines.PeerToPeer):
    """Each step adds 1 to two of ten values; peers stay until all are done."""

    def __init__(self, steps: int, barrier: engines.Barrier) -> None:
        self._steps = steps
        self._done = 0
        self.barrier = barrier

    def start(self) -> None:
        self._random = random.Random(lp.current_node().seed)

    def initial(self) -> Mapping[Any, Any]:
        return dict.fromkeys(range(10), 0)

    def schedule(self) -> Iterable[Any]:
        return self._random.sample(range(10), 2)

    def push(self, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        self._done += 1
        return dict.fromkeys(values, 1)

    def stop(self) -> bool:
        return self._done >= self._steps

    def finish(self) -> None:
        lp.wait_for_stop()


def run_peers(job: engines.PeerToPeer, peers: int, **options: Any) -> None:
    """Runs a program of peers as threads, to its end."""
    program = lp.Program("peers")
    job.add_to(program, peers=peers)
    lp.launch(program, "local_mt", **options).wait()


def _see(peers: engines.PeerToPeerClient, total: int, told: list[Any]) -> None:
    def is_done() -> bool:
        values = [peers.get(number) for number in range(10)]
        told[:] = [values, peers.estimate()]
        return sum(value.value for value in values) >= total and told[1] == 5

    poll_until(is_done, timeout_s=60)
    lp.stop()


@pytest.mark.parametrize(
    "barrier",
    [engines.BSP(), engines.SSP(2), engines.ASP(), engines.PSP(2), engines.PSP(2, resample=0.05)],
    ids=str,
)
def test_each_update_is_applied_once_wherever_its_key_is(barrier: engines.Barrier) -> None:
    program, told = lp.Program("peers"), []
    peers = Counting(12, barrier).add_to(program, peers=5)
    program.add_node(lp.PyNode(_see, peers, 5 * 12 * 2, told), label="see")
    lp.launch(program, "local_mt").wait()
    values, size = told
    assert sum(value.value for value in values) == 5 * 12 * 2
    assert all(value.value == value.version for value in values)
    assert size == 5


class Clock:
    """Lets time pass at once."""

    now = 0.0
    pauses = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses += 1


class Gone:
    """A peer that does not answer."""

    asked = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.asked += 1
            raise courier.ServerUnreachableError(name)

        return call


def test_a_client_pauses_between_its_questions_while_no_peer_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, peer = Clock(), Gone()
    monkeypatch.setattr(peer_to_peer, "time", clock)
    monkeypatch.setattr(courier, "with_timeout", lambda client, _: client)
    with pytest.raises(courier.ServerUnreachableError):
        engines.PeerToPeerClient(peer).get("key")
    assert clock.now > PATIENCE_S
    assert peer.asked <= 1 + clock.pauses


class Leaving(Counting):
    """Peers leave one after the other, each when it is done."""

    def start(self) -> None:
        super().start()
        self._steps += 3 * lp.current_node().replica

    def finish(self) -> None:
        if lp.current_node().replica == 4:
            poll_until(lambda: self.estimate() == 1)  # the others have left
            self.told.append([self.get(number).value for number in range(10)])

    told: list[Any] = []


def test_values_stay_when_peers_leave() -> None:
    Leaving.told.clear()
    run_peers(Leaving(4, engines.PSP(2)), 5)
    [values] = Leaving.told
    assert sum(values) == 2 * sum(4 + 3 * number for number in range(5))


class Ending(Counting):
    def finish(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("peers", [2, 3, 5])
def test_peers_that_end_at_the_same_time_let_each_other_go(peers: int) -> None:
    for _ in range(20):
        run_peers(Ending(10, engines.BSP()), peers)


class Falling(Counting):
    """Some peers crash in their first `start`, or the first one in `initial`."""

    def __init__(self, replicas: Iterable[int], method: str) -> None:
        super().__init__(3, engines.BSP())
        self._replicas = replicas
        self._method = method

    def _fall(self, method: str) -> None:
        node = lp.current_node()
        falls = node.replica in self._replicas and method == self._method
        if falls and not lp.restart_count():
            raise RuntimeError("it falls")

    def start(self) -> None:
        super().start()
        self._fall("start")

    def initial(self) -> Mapping[Any, Any]:
        self._fall("initial")
        return super().initial()


@pytest.mark.parametrize("method", ["start", "initial"])
def test_the_first_peer_makes_the_ring_in_its_second_life_if_there_was_none(method: str) -> None:
    program, told = lp.Program("peers"), []
    peers = Falling([0], method).add_to(program, peers=5)
    program.add_node(lp.PyNode(_see, peers, 5 * 3 * 2, told), label="see")
    lp.launch(program, "local_mt", restart={"peer": "on_failure"}).wait()
    values, _ = told
    assert sum(value.value for value in values) == 5 * 3 * 2


@pytest.mark.parametrize("replicas", [[0, 1], [0]])
def test_no_new_ring_is_made_if_values_may_be_lost(
    replicas: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_peer, "PATIENCE_S", 0.3)
    restart = lp.RestartPolicy("on_failure", max_restarts=1)
    # Which of them gives up first is not known.
    with pytest.raises(lp.NodeFailedError, match=r"peer\[0\]|values are lost"):
        run_peers(
            Falling(replicas, "start"),
            len(replicas) + (len(replicas) > 1),
            restart={"peer": restart},
        )


def test_a_crash_of_the_first_peer_without_a_second_life_ends_the_program() -> None:
    with pytest.raises(lp.NodeFailedError, match=r"peer\[0\](.|\n)*it falls"):
        run_peers(Falling([0], "start"), 3)


class FirstTwo(engines.Barrier):
    """Each peer observes the first two of the others."""

    sample_size = 2
    asked: ClassVar[list[int]] = []

    def may_advance(self, step: int, observed_steps: Sequence[int]) -> bool:
        return step <= min(observed_steps)

    def sample(self, others: Sequence[Any], rng: random.Random) -> list[Any]:
        self.asked.append(len(others))
        return list(others[:2])


class Many(Counting):
    """They stay until one of them has counted all."""

    def finish(self) -> None:
        if lp.current_node().replica == 0:
            poll_until(lambda: self.estimate() == SUCCESSORS + 2)
            lp.stop()
        lp.wait_for_stop()


@pytest.mark.slow
@pytest.mark.parametrize("barrier", [FirstTwo(), engines.PSP(3)], ids=["own", "of the ring"])
def test_more_peers_than_each_knows_are_counted_and_drawn(barrier: engines.Barrier) -> None:
    FirstTwo.asked.clear()
    run_peers(Many(2, barrier), SUCCESSORS + 2)
    assert set(FirstTwo.asked) == ({SUCCESSORS + 1} if isinstance(barrier, FirstTwo) else set())


class Broken(Counting):
    def __init__(self, way: str) -> None:
        super().__init__(3, engines.BSP())
        self._way = way

    def initial(self) -> Any:
        return None if self._way == "no first" else super().initial()

    def schedule(self) -> Any:
        ways = {"key": ["none"], "no keys": None}
        return ways[self._way] if self._way in ways else super().schedule()

    def push(self, values: Mapping[Any, Any]) -> Any:
        return None if self._way == "None" else dict.fromkeys(values, "text")


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("key", r"peer\[\d\]: no value of the key 'none'"),
        ("None", r"peer\[\d\], step 0: push returned None"),
        ("text", r"peer\[\d\]: the update of \d that peer\[\d\] made in step 0 cannot be applied"),
        ("no first", r"peer\[0\]: initial returned None; it is to map keys to values"),
        ("no keys", r"peer\[\d\]: schedule returned None; it is to return keys"),
    ],
)
def test_what_goes_wrong_in_a_step_names_peer_step_and_key(way: str, message: str) -> None:
    with pytest.raises(lp.NodeFailedError, match=message):
        run_peers(Broken(way), 2)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda p: engines.PeerToPeer().add_to(p, peers=1), "has no schedule"),
        (lambda p: Counting(1, engines.BSP()).add_to(p, peers=0), "at least 1 peer and 2 replicas"),
        (lambda p: Counting(1, engines.BSP).add_to(p, peers=1), "an object, as BSP"),  # type: ignore[arg-type]
        (
            lambda p: [Counting(1, engines.BSP()).add_to(p, peers=1) for _ in range(2)],
            "give another label=",
        ),
        (lambda p: Counting(1, engines.BSP()).get(1), r"add_to\(program\) puts it there"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    add: Callable[[lp.Program], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        add(lp.Program("peers"))


class Logged(engines.PeerToPeer):
    """Values are tuples of updates. Each process notes in a file which of its updates were applied."""

    def __init__(self, folder: Path, barrier: engines.Barrier) -> None:
        self._folder = folder
        self.barrier = barrier
        self._update = ""

    def initial(self) -> Mapping[Any, Any]:
        return dict.fromkeys(range(6), ())

    def schedule(self) -> Iterable[Any]:
        if self._update:
            with (self._folder / f"{os.getpid()}.log").open("a") as log:
                log.write(f"{self._update}\n")
        return random.sample(range(6), 2)

    def push(self, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        time.sleep(0.01)
        self._update = uuid.uuid4().hex
        return dict.fromkeys(values, (self._update,))

    def stop(self) -> bool:
        return (self._folder / "stop").exists()

    def finish(self) -> None:
        lp.wait_for_stop()


def _note_values(peers: engines.PeerToPeerClient, folder: Path) -> None:
    poll_until((folder / "stop").exists, timeout_s=90)
    time.sleep(1.0)  # the last steps end
    values = {number: peers.get(number).value for number in range(6)}
    (folder / "values.json").write_text(json.dumps(values))
    lp.stop()


@pytest.mark.slow
@pytest.mark.parametrize("barrier", [engines.BSP(), engines.PSP(2, 1, 0.1)], ids=str)
def test_no_update_is_lost_or_applied_twice_when_two_of_three_replicas_crash_at_a_time(
    barrier: engines.Barrier, tmp_path: Path
) -> None:
    rng, killed = random.Random(1), []
    program = lp.Program("peers")
    peers = Logged(tmp_path, barrier).add_to(program, peers=5, replicas=3)
    program.add_node(lp.PyNode(_note_values, peers, tmp_path), label="note")
    restart = lp.RestartPolicy("on_failure", max_restarts=100, max_backoff_s=0.2)
    running = lp.launch(program, "test_mp", restart={"peer": restart})
    for _ in range(10):
        # Whoever has come back makes steps: nobody is stuck.
        poll_until(lambda: len(list(tmp_path.glob("*.log"))) == 5 + len(killed), timeout_s=30)
        time.sleep(rng.uniform(0, 0.5))
        pids = [node.pid for node in running.status() if node.name.startswith("peer")]
        for pid in rng.sample(pids, 2):
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            time.sleep(rng.choice([0, 0.3]))
            killed.append(pid)
    sizes = {path: path.stat().st_size for path in tmp_path.glob("*.log")}
    poll_until(
        lambda: sum(p.stat().st_size > sizes.get(p, 0) for p in tmp_path.glob("*.log")) == 5,
        timeout_s=30,
    )
    (tmp_path / "stop").touch()
    assert running.wait().outcome is lp.Outcome.STOPPED
    values = json.loads((tmp_path / "values.json").read_text()).values()
    for updates in values:
        assert len(set(updates)) == len(updates)
    found = collections.Counter(update for updates in values for update in updates)
    applied = [line for log in tmp_path.glob("*.log") for line in log.read_text().split()]
    assert [update for update in applied if found[update] != 2] == []
    # What is there besides was on its way when its peer was killed, or stopped.
    assert len(found) - len(applied) <= len(killed) + 5
