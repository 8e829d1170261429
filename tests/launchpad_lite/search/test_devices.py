"""No two workers use the same device, unless they ask for parts of it."""

import contextlib
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import courier
import launchpad_lite as lp
from launchpad_lite._devices import VISIBLE_DEVICES
from launchpad_lite.search import _devices
from launchpad_lite.search._devices import DeviceWish, held_device
from launchpad_lite.search._joining import JOIN_FILE, JoinInfo
from launchpad_lite.search._messages import Life, Load, Member
from launchpad_lite.search._name_server import NameServer
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._registry import Registry
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.executor import Executor
from launchpad_lite.search.tasks import Call
from tests.courier.waiting import wait_until
from tests.launchpad_lite.search.searches import Tasks, output_of, searching, start_worker

SILENCE_S = 5.0
GPUS = ("0", "1")


class Claims:
    """A name server and its workers, in time that the test makes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lives = itertools.count()
        self.members: dict[str, Member] = {}
        self.begin(is_first=True)

    def begin(self, *, is_first: bool) -> None:
        self.registry = Registry(silence_s=SILENCE_S, version="1", now=self.now, is_first=is_first)

    def come(self, name: str) -> None:
        self.members[name] = Member("worker", Life(name, str(next(self.lives))), version="1")
        self.registry.register(self.members[name], self.now)

    def beat(self, name: str) -> None:
        member = self.members[name]
        if not self.registry.beat("worker", member.who, Load(), "", self.now).is_known:
            self.registry.register(member, self.now)

    def claim(self, name: str, share: float, machine: str = "m/1") -> "str | None":
        who = self.members[name].who
        device = self.registry.claim(who, machine, GPUS, share, self.now)
        if device is not None:
            self.members[name] = self.members[name]._replace(
                machine=machine, device=(device, share)
            )
        return device

    def pass_by(self, seconds: float, *heard: str) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            for name in heard:
                self.beat(name)


@pytest.fixture
def claims() -> Claims:
    claims = Claims()
    for name in ("a", "b", "c"):
        claims.come(name)
    return claims


def test_each_gets_a_device_of_its_own_until_none_is_left(claims: Claims) -> None:
    assert {claims.claim("a", 1), claims.claim("b", 1)} == set(GPUS)
    with pytest.raises(SearchError, match=r"c: no device of m has 0.5 of it left: 0: 1 used, 1: 1"):
        claims.claim("c", 0.5)
    assert claims.claim("c", 1, machine="n/2") is not None  # another machine


def test_parts_fill_one_device_before_the_next(claims: Claims) -> None:
    assert claims.claim("a", 0.5) == claims.claim("b", 0.5)
    assert claims.claim("c", 1) is not None


def test_three_thirds_fit(claims: Claims) -> None:
    assert len({claims.claim(name, 1 / 3) for name in ("a", "b", "c")}) == 1


def test_who_asks_again_keeps_one_device(claims: Claims) -> None:
    assert claims.claim("a", 1) is not None
    assert claims.claim("a", 1) is not None
    assert claims.claim("b", 1) is not None


def test_a_device_is_free_when_its_worker_leaves_is_silent_or_comes_back(claims: Claims) -> None:
    claims.claim("a", 1)
    claims.claim("b", 1)
    claims.registry.leave("worker", claims.members["a"].who)
    assert claims.claim("c", 1) is not None
    claims.pass_by(SILENCE_S, "c")
    claims.come("d")
    assert claims.claim("d", 1) is not None  # that of b
    claims.come("d")  # started again
    assert claims.claim("d", 1) is not None


def test_a_name_server_that_was_started_again_waits_until_it_knows_who_has_what(
    claims: Claims,
) -> None:
    claims.claim("a", 1)
    claims.begin(is_first=False)
    claims.beat("b")
    assert claims.claim("b", 1) is None
    claims.pass_by(SILENCE_S, "a", "b", "c")
    device, _ = claims.members["a"].device or ("", 0)
    assert claims.claim("b", 1) == ({"0", "1"} - {device}).pop()
    with pytest.raises(SearchError, match="no device"):
        claims.claim("c", 1)


def test_a_worker_that_is_not_known_is_to_ask_again(claims: Claims) -> None:
    claims.begin(is_first=True)
    assert claims.claim("a", 1) is None


_NAMES = st.sampled_from("abcde")
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), _NAMES),
        st.tuples(st.just("leave"), _NAMES),
        st.tuples(st.just("claim"), _NAMES, st.sampled_from([0.25, 0.5, 1.0])),
        st.tuples(st.just("time"), st.integers(1, 4)),
        st.tuples(st.just("restart")),
    ),
    max_size=40,
)


@given(_STEPS)
def test_no_device_is_given_twice(steps: list[Any]) -> None:
    claims = Claims()
    for step, *arguments in steps:
        if step == "come":
            claims.come(*arguments)
        elif step == "leave" and (member := claims.members.pop(arguments[0], None)):
            claims.registry.leave("worker", member.who)
        elif step == "claim" and arguments[0] in claims.members:
            with contextlib.suppress(SearchError):
                claims.claim(*arguments)
        elif step == "time":
            claims.pass_by(arguments[0], *claims.members)
        elif step == "restart":
            claims.begin(is_first=False)
        used = dict.fromkeys(GPUS, 0.0)
        for member in claims.members.values():
            if member.device is not None:
                used[member.device[0]] += member.device[1]
        assert max(used.values()) <= 1


# In processes.


def seen(folder: Path) -> "str | None":
    """Waits until all others run as well; returns the devices that it sees."""
    (folder / f"task-{os.getpid()}").touch()
    while len(list(folder.glob("task-*"))) < 2:
        time.sleep(0.01)
    return os.environ.get(VISIBLE_DEVICES)


@pytest.mark.slow
def test_workers_of_one_machine_see_a_device_each(tmp_path: Path) -> None:
    model = Tasks(Call(seen, tmp_path), Call(seen, tmp_path))
    path = tmp_path / JOIN_FILE
    with searching(model, tmp_path) as search:
        options = [path, "--device-share=1"]
        workers = [start_worker(*options, CUDA_VISIBLE_DEVICES="3,GPU-x") for _ in range(2)]
        try:
            assert "error" not in "".join(map(output_of, workers))
            assert sorted(search.model().results) == ["3", "GPU-x"]
        finally:
            for each in workers:
                each.kill()


@pytest.mark.slow
def test_workers_of_a_program_see_a_device_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "4,5")
    model = Tasks(Call(seen, tmp_path), Call(seen, tmp_path))
    with searching(model, tmp_path, launcher="test_mp", workers=2, device_share=1) as search:
        wait_until(lambda: search.status().is_over)
        assert sorted(search.model().results) == ["4", "5"]


@pytest.mark.slow
def test_workers_of_an_executor_see_a_device_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "4,5")
    with Executor(workers=2, launcher="test_mp", device_share=1) as executor:
        assert sorted(executor.map(seen, [tmp_path] * 2)) == ["4", "5"]


# One worker.


@pytest.fixture
def presence() -> Any:
    secret = courier.Secret.generate()
    server = NameServer(Timing(), is_first=True)
    with courier.Server(server, secret=secret) as served:
        info = JoinInfo(served.address, secret)

        def make(name: str) -> Presence:
            member = Member("worker", Life(name, name), version=lp.__version__)
            return Presence(member, info.connect(), {}, info.connect, Timing())

        yield make


QUICK = Timing(beat_s=0.05, lease_s=0.2, silence_s=0.2)


def test_the_variable_is_as_before_when_the_worker_ends(
    presence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "7,8")
    with held_device(presence("a"), DeviceWish(), QUICK, threading.Event()):
        assert os.environ[VISIBLE_DEVICES] in ("7", "8")
    assert os.environ[VISIBLE_DEVICES] == "7,8"
    with held_device(presence("a"), None, QUICK, threading.Event()):
        assert os.environ[VISIBLE_DEVICES] == "7,8"


def test_two_workers_of_one_process_cannot_have_devices(
    presence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "7,8")
    with (
        held_device(presence("a"), DeviceWish(), QUICK, threading.Event()),
        pytest.raises(SearchError, match="b: another worker of this process uses a device"),
        held_device(presence("b"), DeviceWish(devices=("9",)), QUICK, threading.Event()),
    ):
        pass


def test_a_worker_gives_up_when_no_device_becomes_free(presence: Any) -> None:
    wish = DeviceWish(devices=("0",))
    with (
        held_device(presence("a"), wish, QUICK, threading.Event()),
        pytest.raises(
            SearchError, match=r"no device of .* has 1 of it left: 0: 1 used; start fewer"
        ),
        held_device(presence("b"), wish, QUICK, threading.Event()),
    ):
        pass


def test_a_machine_without_devices_is_named(presence: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "")
    with (
        pytest.raises(
            SearchError, match="device_share=1 needs a device, and CUDA_VISIBLE_DEVICES="
        ),
        held_device(presence("a"), DeviceWish(), QUICK, threading.Event()),
    ):
        pass


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_a_share_is_a_part_of_one_device(share: float) -> None:
    with pytest.raises(ValueError, match="a part of one device, up to 1"):
        _devices.DeviceWish(share)
