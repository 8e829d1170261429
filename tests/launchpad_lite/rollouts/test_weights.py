"""Versioned parameters for many readers."""

import collections
import itertools
import pickle
import socket
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import courier
import launchpad_lite as lp
from launchpad_lite import rollouts
from launchpad_lite.rollouts import _relay, weights as weights_module
from launchpad_lite.testing import poll_until
from launchpad_lite.testing.programs import ProgramLauncher


def run(work: Callable[..., object], *, launcher: str = "local_mt", **options: Any) -> None:
    """Runs functions with weights, each in a node."""
    program = lp.Program("weights")
    weights = rollouts.Weights(**options).add_to(program)
    program.add_node(lp.PyNode(work, weights), label="work")
    lp.launch(program, launcher).wait()


def _publish(weights: rollouts.WeightsClient, versions: int) -> None:
    params = {"a": np.zeros(300_000), "b": [np.zeros(10, np.float32)]}
    for version in range(1, versions + 1):
        params["a"][:] = version
        params["b"][0][:] = version
        assert weights.publish(params) == version


def _check(weights: rollouts.WeightsClient, versions: int) -> None:
    seen = 0
    for params, version in weights.versions():
        assert version > seen
        seen = version
        for array in (params["a"], params["b"][0]):
            assert (array.min(), array.max()) == (version, version)
            array[:] = -1  # the reader's own
        if version == versions:
            return


@pytest.mark.parametrize("launcher", ["local_mt", "test_mp"])
def test_readers_see_whole_versions_the_newest_of_which_comes_last(
    launch_program: ProgramLauncher, launcher: str
) -> None:
    program = lp.Program("weights")
    weights = rollouts.Weights().add_to(program)
    program.add_node(lp.PyNode(_publish, weights, 200), label="trainer")
    with program.group("reader"):
        for _ in range(2):
            program.add_node(lp.PyNode(_check, weights, 200))
    launch_program(program, launcher).wait()


def test_another_structure_and_nan_are_refused_with_their_place() -> None:
    first = {"layers": [np.zeros((2, 3)), np.zeros(3)], "count": 1}
    wrong = [
        ({**first, "layers": [np.zeros((2, 4)), np.zeros(3)]}, r"params\['layers'\]\[0\] is float64 of shape \(2, 4\), and was .*\(2, 3\)"),
        ({**first, "layers": [np.zeros((2, 3))]}, r"params\['layers'\]\[1\] is missing"),
        ({**first, "bias": 0}, r"params\['bias'\] is new"),
        ({**first, "layers": [np.zeros((2, 3)), np.full(3, np.nan)]}, r"params\['layers'\]\[1\] has a NaN"),
    ]  # fmt: skip

    def work(weights: rollouts.WeightsClient) -> None:
        weights.publish(first)
        for params, message in wrong:
            with pytest.raises(rollouts.WeightsError, match=message):
                weights.publish(params)
        assert weights.latest().version == 1

    run(work, refuse_nan=True)


def test_a_reader_waits_for_a_newer_version_or_for_some_time() -> None:
    def work(weights: rollouts.WeightsClient) -> None:
        with pytest.raises(TimeoutError, match="no version of the weights is newer than 0"):
            weights.get(timeout_s=0.1)
        seen: list[tuple[int, int]] = []
        weights.subscribe(lambda params, version: seen.append((params, version)))
        threading.Timer(0.1, weights.publish, (10,)).start()
        assert weights.get(0) == (10, 1)
        poll_until(lambda: seen)
        weights.publish(20)
        poll_until(lambda: len(seen) == 2)
        assert seen == [(10, 1), (20, 2)]

    run(work)


def test_another_machine_is_sent_only_arrays_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_host_of_caller", lambda: "127.0.0.1")
    versions: list[Any] = []

    def work(weights: rollouts.WeightsClient) -> None:
        known = None
        for change in ("", "", "z", "a", "", "za", "n"):
            params = {"z": np.full(5, 1.0), "a": [np.float32(2), np.zeros(0)], "n": 3}
            params["z"][4] += len(versions) * ("z" in change)
            params["a"][0] += len(versions) * ("a" in change)
            params["n"] += len(change)
            weights.publish(params)
            version = versions[-1].version if versions else 0
            versions.append(weights.get(version, known=known))
            known = versions[-1].params
            assert known == params | {"z": known["z"], "a": known["a"]}
            assert list(known) == list(params)  # also their order
            assert (known["z"] == params["z"]).all()
            assert known["a"][0] == params["a"][0]

    run(work)
    pairs = list(itertools.pairwise([each.params for each in versions]))
    assert ["z" * (new["z"] is not old["z"]) + "a" * (new["a"][0] is not old["a"][0]) for old, new in pairs] == [
        # The first reader that has a version gets all.
        "za", "z", "za", "a", "za", "za",
    ]  # fmt: skip


def test_another_machine_is_sent_what_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_host_of_caller", lambda: "127.0.0.1")

    def work(weights: rollouts.WeightsClient) -> None:
        found, known = rollouts.VersionedWeights(None, 0), None
        for number in range(3):
            ragged = np.array([np.full(2, number), np.zeros(3)], object)
            weights.publish({"ragged": ragged, "same": np.ones(2)})
            found = weights.get(found.version, known=known, timeout_s=20)
            known = found.params
            assert known["ragged"][0].tolist() == [number] * 2

    run(work)


def test_arrays_are_converted_on_the_way() -> None:
    params = {"a": np.full(3, 1.5), "b": np.arange(3), "c": "text"}

    def work(weights: rollouts.WeightsClient) -> None:
        weights.publish(params)
        found = weights.latest().params
        kinds.append({name: str(getattr(leaf, "dtype", leaf)) for name, leaf in found.items()})

    kinds: list[dict[str, str]] = []
    run(work, dtype="float16")
    run(work, dtype=lambda leaf: leaf if leaf is params["a"] else np.zeros(1, np.int8))
    assert kinds == [
        {"a": "float16", "b": "int64", "c": "text"},
        {"a": "float64", "b": "int8", "c": "int8"},
    ]


def test_tensors_are_converted_on_the_way() -> None:
    torch = pytest.importorskip("torch")
    seen = []

    def work(weights: rollouts.WeightsClient) -> None:
        weights.publish([torch.ones(2), torch.arange(2)])
        seen.extend(each.dtype for each in weights.latest().params)

    run(work, dtype="bfloat16")
    assert seen == [torch.bfloat16, torch.int64]


class Hosts:
    """Each reader on a machine of its own, as far as there are so many: loopback has many addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machines: int = 100) -> None:
        self.relays: dict[int, _relay.WeightsRelay] = {}
        #: Of each version, by how many readers it was got from the node.
        self.sent: collections.Counter[int] = collections.Counter()
        get, start = weights_module.WeightsNode.get, _relay.WeightsRelay._start

        async def get_counted(node: Any, *args: Any) -> _relay.SentWeights:
            found = await get(node, *args)
            self.sent[found.version] += not found.holder and found.version > 0
            return found

        def start_there(relay: _relay.WeightsRelay, _: str) -> str:
            replica = lp.current_node().replica
            self.relays[replica] = relay
            return start(relay, f"127.0.0.{2 + replica % machines}")

        monkeypatch.setattr(weights_module, "_host_of_caller", lambda: "127.0.0.1")
        monkeypatch.setattr(weights_module.WeightsNode, "get", courier.idempotent(get_counted))
        monkeypatch.setattr(_relay.WeightsRelay, "_start", start_there)

    def run(self, readers: int, versions: int, before: Callable[[int], object]) -> None:
        """Has all read each version, before the next is published."""
        barrier = threading.Barrier(readers + 1, timeout=30)

        def publish(weights: rollouts.WeightsClient) -> None:
            params = {"a": np.zeros(300_000), "b": np.zeros(300_000)}
            for version in range(1, versions + 1):
                before(version)
                params["a"][:] = version
                weights.publish(params)
                barrier.wait()
                barrier.wait()
            lp.stop()

        def read(weights: rollouts.WeightsClient) -> None:
            found, known = rollouts.VersionedWeights(None, 0), None
            for version in range(1, versions + 1):
                barrier.wait()
                found = weights.get(found.version, known=known)
                known = {name: array.copy() for name, array in found.params.items()}
                assert found.version == version
                for array, value in ((known["a"], version), (known["b"], 0)):
                    assert (array.min(), array.max()) == (value, value)
                found.params["a"][:] = -1  # the reader's own
                barrier.wait()
            lp.wait_for_stop()

        program = lp.Program("weights")
        weights = rollouts.Weights().add_to(program)
        program.add_node(lp.PyNode(publish, weights), label="trainer")
        with program.group("reader"):
            for _ in range(readers):
                program.add_node(lp.PyNode(read, weights))
        lp.launch(program, "local_mt").wait()


def test_the_node_sends_a_version_to_one_machine_which_passes_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = Hosts(monkeypatch)
    hosts.run(4, 5, lambda _: None)
    assert hosts.sent == dict.fromkeys(range(1, 6), 1)


@pytest.mark.parametrize("fault", ["lost", "silent"])
def test_after_a_reader_that_passes_nothing_on_others_ask_the_node(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    hosts = Hosts(monkeypatch)

    def break_links(version: int) -> None:
        if version == 2 and fault == "lost":  # nobody listens there
            monkeypatch.setattr(weights_module.WeightsNode, "_holder", lambda *_: "127.0.0.1:1")
        elif version == 2:
            monkeypatch.setattr(_relay.WeightsRelay, "keep", lambda *_: None)
            for relay in hosts.relays.values():
                relay._limit_s = 0.2

    hosts.run(3, 3, break_links)
    assert hosts.sent == {1: 1, 2: 3, 3: 3}


class _Sparse:
    """As a sparse tensor of PyTorch."""

    @property
    def nbytes(self) -> int:
        raise RuntimeError("nbytes is not defined for sparse tensors")


def test_another_machine_gets_leaves_without_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)

    def work(weights: rollouts.WeightsClient) -> None:
        weights.publish({"a": _Sparse()})
        assert isinstance(weights.get().params["a"], _Sparse)
        lp.stop()

    run(work)
    assert hosts.sent[1] == 1


def test_one_reader_of_a_machine_keeps_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, kept = Hosts(monkeypatch, machines=1), []

    def look(_: int) -> None:
        sent = [relay._sent for relay in hosts.relays.values()]
        kept.append([each.version for each in sent if each.value is not None])

    hosts.run(2, 6, look)
    assert kept == [[], [1], [2], [3], [4], [5]]


def test_a_port_that_now_belongs_to_others_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, found = Hosts(monkeypatch), []

    def work(some: rollouts.WeightsClient, others: rollouts.WeightsClient) -> None:
        with courier.Server(_Getter(), secret=some._relay._secret) as server:
            for weights, value in ((some, 1.0), (others, 2.0)):
                weights.publish(np.full(300_000, value))
                assert weights.get().params[0] == value
            addresses = others._relay.address(), server.address
            asked = [_relay.SentWeights(1, 0, None, address) for address in addresses]
            assert others._relay.ask(asked[0]).version
            found.extend(map(some._relay.ask, asked))
        lp.stop()

    program = lp.Program("weights")
    both = [rollouts.Weights().add_to(program, label=label) for label in ("some", "others")]
    program.add_node(lp.PyNode(work, *both), label="trainer")
    lp.launch(program, "local_mt").wait()
    assert found == [_relay.SentWeights()] * 2
    assert hosts.sent[1] == 2


class _Getter:
    def get(self, *_: Any) -> Any:
        raise KeyError


def test_a_stop_ends_the_wait_for_a_reader_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted: list[Any] = []
    Hosts(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(weights_module.WeightsNode, "_holder", lambda *_: address)

        def publish(weights: rollouts.WeightsClient) -> None:
            weights.publish(np.zeros(300_000))
            accepted.append(silent.accept())
            lp.stop()

        def read(weights: rollouts.WeightsClient) -> None:
            with pytest.raises(TimeoutError):
                weights.get()

        program = lp.Program("weights")
        weights = rollouts.Weights().add_to(program)
        program.add_node(lp.PyNode(publish, weights), label="trainer")
        program.add_node(lp.PyNode(read, weights), label="reader")
        began_at = time.monotonic()
        assert not lp.launch(program, "local_mt").wait().killed
        assert time.monotonic() - began_at < 5
        accepted[0][0].close()


def test_threads_that_ask_a_lost_reader_at_once_count_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = Hosts(monkeypatch)

    def work(weights: rollouts.WeightsClient) -> None:
        weights.publish(np.zeros(300_000))
        weights.get()
        for _ in range(3):
            assert not hosts.relays[0].ask(_relay.SentWeights(1, 0, None, "127.0.0.1:1")).version
        lp.stop()

    run(work)
    assert hosts.relays[0]._alone_s == 2 * _relay._ALONE_S


def test_a_client_can_be_passed_to_another_node() -> None:
    def work(weights: rollouts.WeightsClient) -> None:
        version = weights.publish(1)
        assert pickle.loads(pickle.dumps(weights)).get() == (1, version)
        lp.stop()

    run(work)


def test_a_forked_child_passes_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch)

    def work(weights: rollouts.WeightsClient) -> None:
        weights.publish(np.zeros(300_000))
        weights.get()
        assert hosts.relays[0].address()
        with monkeypatch.context() as patch:
            patch.setattr(_relay, "os", types.SimpleNamespace(getpid=lambda: 0))
            assert not hosts.relays[0].address()
        lp.stop()

    run(work)
