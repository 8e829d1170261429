"""How a machine is divided among nodes: who gets which core and device, and when it is too small."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from launchers.host.grant import Grant
from launchers.host.memory import memory_bytes
from launchers.supervision.allotment import Machine, allot
from launchpad_lite.parts.devices import VISIBLE_DEVICES
from tests.launchers.wishes import Wish, cpu, executables, gpu

MACHINE = Machine(
    (0, 1, 2, 3), 8 << 30, ("0", "1", "GPU-c"), "CUDA_VISIBLE_DEVICES=0,1,GPU-c shows"
)


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ({"learner": gpu(2), "actor": gpu(1)}, ["0,1", "GPU-c"]),
        # Nodes that want none see none, where others have one.
        ({"learner": gpu(1), "actor": [{}]}, ["0", ""]),
        ({"actor": gpu(0)}, [""]),
        # Parts of a device share it, and leave those alone that are owned.
        ({"big": gpu(1), "small": gpu(0.5, 0.5, 0.5, 0.5)}, ["0", "1", "1", "GPU-c", "GPU-c"]),
        # Programs that ask for nothing are left alone.
        ({"actor": [{}, {}]}, [None, None]),
    ],
)
def test_nodes_see_the_devices_that_they_asked_for(
    groups: dict[str, list[Wish]], devices: list[str | None]
) -> None:
    grants = allot(executables(groups), MACHINE).grants.values()
    assert [grant.environment.get(VISIBLE_DEVICES) for grant in grants] == devices


def test_whole_cores_have_one_owner() -> None:
    grants = allot(executables({"learner": cpu(2), "actor": cpu(1)}), MACHINE).grants
    assert grants["learner[0]"].cores == (0, 1)
    assert grants["actor[0]"].cores == (2,)
    assert allot(executables({"actor": [{}]}), MACHINE).grants == {"actor[0]": Grant()}


def test_devices_that_the_environment_of_a_group_names_are_what_it_gets() -> None:
    nodes = executables({"learner": gpu(1), "other": [{}]}, other={"env": {VISIBLE_DEVICES: "0"}})
    assert allot(nodes, MACHINE).grants["other[0]"].environment == {VISIBLE_DEVICES: "0"}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"learner": [{"cpu": 2}], "actor": [{"cpu": 1}] * 8},
            "cpu: learner 1 x 2 + actor 8 x 1 = 10 cores are asked for, this process may use 4;",
        ),
        (
            {"learner": [{"ram": 6}], "actor": [{"ram": 1.5}] * 2},
            "ram_gib: learner 1 x 6 + actor 2 x 1.5 = 9 GiB are asked for, this machine has 8;",
        ),
        (
            {"a": [{"gpu": 1}, {"gpu": 2}], "b": [{"gpu": 0.5}]},
            "3.5 devices are asked for, CUDA_VISIBLE_DEVICES=0,1,GPU-c shows 3;",
        ),
        *(
            ({"a": [{"cpu": 9, "ram": 9, "gpu": 9}]}, message)  # all at once
            for message in ("cpu: a 1 x 9", "ram_gib: a 1 x 9", "9 devices")
        ),
        ({"a": [{"gpu": 0.6}] * 4}, "the parts 0.6, 0.6, 0.6, 0.6 do not fit on 3 devices"),
    ],
)
def test_too_much_is_a_mistake_that_shows_the_arithmetic(
    groups: dict[str, list[Wish]], message: str
) -> None:
    result = allot(executables(groups), MACHINE)
    assert any(message in mistake for mistake in result.mistakes), result.mistakes
    assert not result.grants


def test_what_a_system_cannot_do_is_noted() -> None:
    machine = MACHINE._replace(binds=False, limits=False)
    notes = allot(executables({"a": [{"cpu": 1, "ram": 1}]}), machine).notes
    assert notes == [
        "cpu: this system cannot bind processes to cores",
        "ram_gib: this system cannot limit the memory of processes",
    ]


_WISHES = st.lists(
    st.sampled_from([0, 0.1, 0.25, 0.3, 0.5, 0.6, 0.75, 1, 1.5, 2, 3]), min_size=1, max_size=8
)


@given(_WISHES)
def test_cores_are_never_promised_twice(wishes: list[float]) -> None:
    result = allot(executables({"a": cpu(*wishes)}), MACHINE)
    assert bool(result.mistakes) == (sum(wishes) > 4 + 1e-6)
    owners = Counter(core for grant in result.grants.values() for core in grant.cores)
    for wish, grant in zip(wishes, result.grants.values(), strict=False):
        assert len(grant.cores) >= wish
        whole = [core for core in grant.cores if owners[core] == 1]
        assert len(whole) >= int(wish)


@given(st.lists(st.sampled_from([0, 0.25, 0.5, 1, 2]), min_size=1, max_size=6))
def test_devices_are_never_promised_twice(wishes: list[float]) -> None:
    result = allot(executables({"a": gpu(*wishes)}), MACHINE)
    if result.mistakes:
        assert sum(wishes) > 1  # halves and quarters always fit where whole ones leave a device
        return
    load: Counter[str] = Counter()
    for wish, grant in zip(wishes, result.grants.values(), strict=True):
        devices = str(grant.environment.get(VISIBLE_DEVICES, "")).split(",")
        devices = [device for device in devices if device]
        assert len(devices) == (int(wish) if wish >= 1 else int(wish > 0))
        for device in devices:
            load[device] += min(wish, 1)  # type: ignore[assignment]
    assert all(promised <= 1 for promised in load.values())


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [("", ()), ("0,2", ("0", "2")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b")), ("1,-1,2", ("1",))],
)
def test_this_machine_has_the_devices_that_cuda_would_see(
    monkeypatch: pytest.MonkeyPatch, listed: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, listed)
    machine = Machine.here()
    assert machine.gpus == gpus
    assert machine.gpus_shown_by == f"CUDA_VISIBLE_DEVICES={listed} shows"


def test_this_machine_has_what_this_process_may_use() -> None:
    machine = Machine.here()
    if hasattr(os, "sched_getaffinity"):
        assert set(machine.cores) == os.sched_getaffinity(0)
    assert machine.ram_bytes == memory_bytes() > 1 << 28
    if Path("/proc/meminfo").exists():
        total_kib = int(Path("/proc/meminfo").read_text().split()[1])
        assert machine.ram_bytes <= total_kib * 1024
