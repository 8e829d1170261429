"""What is kept of a training."""

import collections
import contextlib
import functools
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import launchpad_lite as lp
from launchpad_lite import replicas
from launchpad_lite.replicas import _payload, _state
from launchpad_lite.replicas._state import LoopPlace, Training, packed
from tests.engines import needs_torch
from tests.launchpad_lite.replicas import torch_replicas  # noqa: F401 - loads torch before a test
from tests.launchpad_lite.replicas.together import in_memory, returned, together

with contextlib.suppress(ImportError):
    import torch


def kept_in(training: Training) -> Any:
    """Returns what is in the newest snapshot, and after how many steps it was taken."""
    newest = training.newest()
    if newest is None:
        return None
    return newest.step, {name: _payload.unpack(each) for name, each in newest.kept.items()}


def training_after(step: int = 7, **kept: Any) -> Training:
    training = Training()
    training.kept = kept
    training.step = step
    training.take()
    return training


class Saved(Training):
    """A training whose newest snapshot is on disk."""

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__()
        training.save(folder)
        self.restore(folder)


def alone(training: Training) -> replicas.Replicator:
    """Returns the only replica of a training that goes on."""
    repl = replicas.NonReplicator()
    repl._me.training = training
    return repl


def test_a_snapshot_is_taken_between_two_steps(tmp_path: Path) -> None:
    training = Training()
    weights = {"w": np.zeros(2)}
    training.kept = {"weights": weights}
    training.begin_steps()
    saving = threading.Thread(target=training.save, args=(tmp_path,))
    saving.start()
    while saving.is_alive():
        training.between_steps()
        weights["w"] += 1
        training.step += 1
    saving.join()
    restored = Training()
    restored.restore(tmp_path)
    step, kept = kept_in(restored)
    np.testing.assert_array_equal(kept["weights"]["w"], np.full(2, step))


def test_steps_go_on_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, weights, dump = training_after(), np.zeros(1 << 12), _state.pickle.dump
    training.kept = {"weights": weights}

    def write(*args: Any, **kwargs: Any) -> None:
        weights[...] = 2.0
        training.step += 1
        dump(*args, **kwargs)

    weights[...] = 1.0
    training.take()
    monkeypatch.setattr(_state.pickle, "dump", write)
    training.save(tmp_path)
    assert kept_in(training)[1]["weights"][0] == 1.0


def test_what_was_last_is_saved_when_no_more_steps_are_made(tmp_path: Path) -> None:
    training = training_after(numbers=[1, 2])
    training.begin_steps()
    training.end_steps()
    for number in range(2):  # the second one writes what it reads
        (tmp_path / str(number)).mkdir()
        training.save(tmp_path / str(number))
        restored = Training()
        restored.restore(tmp_path / str(number))
        assert kept_in(restored) == (7, {"numbers": [1, 2]})


def test_nothing_is_restored_where_nothing_was_saved(tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path)
    training.restore(tmp_path)
    assert training.newest() is None


def test_a_snapshot_takes_as_much_memory_as_what_is_kept(tmp_path: Path) -> None:
    size = 1 << 24
    training = Training()
    training.kept = {"weights": [np.ones(size // 4, np.uint8) for _ in range(4)]}
    training.take()
    again = tmp_path / "again"
    again.mkdir()
    saves = [functools.partial(training.save, folder) for folder in (tmp_path, again)]
    for use in (training.take, *saves, training.newest):
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        held = use()
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        assert peak < 1.2 * size
        del held


class Count(NamedTuple):
    number: int
    part: Any


class HasState:
    """As models and optimizers: it holds on to what it loads."""

    def __init__(self) -> None:
        self.values = np.zeros(2)

    def state_dict(self) -> Any:
        return {"values": self.values}

    def load_state_dict(self, state: Any) -> None:
        self.values = state["values"]


def things(fill: Callable[[float], float]) -> dict[str, Any]:
    """Returns what can be kept, with numbers in all places."""
    has_state = HasState()
    has_state.values[...] = fill(1)
    masked = np.ma.array([fill(2), 0.0], mask=[False, bool(fill(1))])
    table = collections.defaultdict(lambda: np.zeros(1))
    table["a"][...] = fill(3)
    return {
        "state": {"model": has_state, "again": [has_state]},
        "arrays": [np.full(2, fill(4)), {"nested": (np.full((), fill(5)), has_state)}],
        "numbers": {"best": fill(6), "epoch": Count(int(fill(7)), "text"), 3: None},
        "masked": masked,
        "table": table,
        "fortran": np.asfortranarray(np.full((200, 300), fill(8))),
        "ordered": collections.OrderedDict(a=fill(9)),
    }


def text_of(kept: Any) -> str:
    """Returns all numbers that are kept."""
    shown = {**kept, "state": kept["state"]["model"].values, "table": dict(kept["table"])}
    nested = kept["arrays"][1]["nested"]
    return repr({**shown, "arrays": (kept["arrays"][0], nested[0])})


def test_what_is_kept_is_changed_where_it_lies(tmp_path: Path) -> None:
    repl = alone(Saved(tmp_path, training_after(**things(float))))
    kept = things(lambda _: 0.0)
    model, array = kept["state"]["model"], kept["arrays"][0]
    repl.keep(**kept)
    assert text_of(kept) == text_of(things(float))
    assert kept["state"] == {"model": model, "again": [model]}
    assert kept["arrays"][0] is array
    assert kept["table"]["new"] == np.zeros(1)
    assert repl.step == 7


def test_what_is_kept_is_that_of_replica_0_in_all(tmp_path: Path) -> None:
    def story(repl: replicas.Replicator) -> str:
        kept = things(float if repl.replica_id == 0 else lambda _: 0.0)
        repl.keep(**kept)
        return text_of(kept)

    assert returned(together(in_memory(3), story)) == [text_of(things(float))] * 3


class Rebinding:
    """Can only be replaced: nothing says what its state is."""


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        (0.1, "rate: a float cannot be kept"),
        (np.float64(0.1), "rate: a float64 cannot be kept"),
        ((1, 2), "rate: a tuple cannot be kept"),
        ({"rng": [Rebinding()]}, r"rate\['rng'\]\[0\]: a Rebinding cannot be kept"),
        ({"seen": {1}}, r"rate\['seen'\]: a set cannot be kept"),
        ((np.zeros(2), 0.1), r"rate\[1\]: a float cannot be kept"),
    ],
)
def test_what_can_only_be_replaced_is_refused(kept: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^{text}: it can only be replaced.*state = repl.state"):
        replicas.NonReplicator().keep(rate=kept)


def test_arrays_that_cannot_be_filled_are_refused() -> None:
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    for array in (fixed, np.array([None])):
        with pytest.raises(
            TypeError, match=r"x\[0\]: an array of objects, or one that is read-only"
        ):
            replicas.NonReplicator().keep(x=[array])


def test_what_lies_in_two_places_of_which_each_may_change_is_refused() -> None:
    params = {"w": 1.0}
    with pytest.raises(TypeError, match=r"x\['target'\] cannot .* the same as x\['online'\]"):
        replicas.NonReplicator().keep(x={"online": params, "target": params})


def test_what_cannot_be_pickled_is_named_when_it_is_kept() -> None:
    with pytest.raises(TypeError, match="state cannot be kept: it cannot be pickled"):
        replicas.NonReplicator().state(lock=threading.Lock())


@pytest.mark.parametrize("now", [np.zeros(3), np.zeros(2, np.float32), {}, [], (np.zeros(2),)])
def test_what_is_not_what_it_was_is_named(now: Any) -> None:
    repl = alone(training_after(nest={"w": np.zeros(2)}))
    with pytest.raises(
        replicas.ReplicaError, match=r"nest\['w'\] is .*, but float64\[2\], a ndarray"
    ):
        repl.keep(nest={"w": now})


def test_values_of_a_state_are_replaced_by_what_they_were() -> None:
    def begun(start: float) -> tuple[replicas.Replicator, Any]:
        return repl, repl.state(best=start, weights=np.zeros(3), model=model)

    model = HasState()
    repl = replicas.NonReplicator()
    _, state = begun(0.0)
    state.best, state.weights, state.more = 0.5, np.ones(4), {"a": 1}
    model.values[...] = 3.0
    training = training_after(state=state)
    model.values[...] = 0.0
    repl = alone(training)
    _, state = begun(0.0)
    assert (state.best, state.weights.tolist(), state.more) == (0.5, [1.0] * 4, {"a": 1})
    assert state.model is model
    assert model.values.tolist() == [3.0, 3.0]
    with pytest.raises(replicas.ReplicaError, match="there is a state already"):
        repl.state(other=1)


def test_what_is_restored_shares_nothing_with_the_snapshot() -> None:
    training = training_after(weights=np.zeros(1 << 12), model=HasState())
    for _ in range(2):
        weights, model = np.ones(1 << 12), HasState()
        alone(training).keep(weights=weights, model=model)
        assert weights[0] == model.values[0] == 0.0
        weights += 1.0
        model.values += 1.0


def test_a_snapshot_without_what_is_kept_now_is_refused() -> None:
    training = training_after(model=[1], optimizer=[2])
    with pytest.raises(replicas.ReplicaError, match=r"has no net, but model, optimizer"):
        alone(training).keep(net=[1])
    repl = alone(training)
    repl.keep(model=[1])
    with pytest.raises(replicas.ReplicaError, match=r"has no ema"):
        repl.keep(optimizer=[1], ema=[2])
    repl.keep(ema=[2])
    alone(training_after()).keep(net=[1])


def test_what_is_kept_by_the_same_name_again_does_not_go_back() -> None:
    repl = alone(training_after(model=[1]))
    model = [0]
    repl.keep(model=model)
    assert model == [1]
    model[0] = 5  # the user has loaded something better
    repl.keep(model=model)
    assert model == [5]


def test_what_is_kept_later_neither_changes_nor_takes_steps_back() -> None:
    repl = replicas.NonReplicator()
    repl.keep(first=[1])
    list(repl.run(lambda: 1, steps=2))
    repl._me.training.take()
    second = {"two": 2}
    repl.keep(second=second)
    assert second == {"two": 2}
    assert repl.step == 2


def test_all_go_on_with_the_newest_snapshot_that_a_replica_has() -> None:
    def story(repl: replicas.Replicator) -> Any:
        steps = {1: 5, 2: 9}
        if repl.replica_id in steps:
            step = steps[repl.replica_id]
            repl._me.training = training_after(step, weights=np.full(1 << 12, float(step)))
        weights = np.zeros(1 << 12)
        repl.keep(weights=weights)
        return repl.step, weights[0]

    assert returned(together(in_memory(4), story)) == [(9, 9.0)] * 4


@needs_torch
def test_tensors_models_and_optimizers_in_containers_are_filled() -> None:
    def made() -> Any:
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return {
            "model": model,
            "optimizers": [torch.optim.Adam(model.parameters())],
            "tensors": (torch.randn(2, 2, requires_grad=True), torch.randn(64, 64)),
            "low": torch.randn(3).to(torch.bfloat16),
            "eight": torch.randn(3).to(torch.float8_e4m3fn),
            "flag": torch.tensor(bool(torch.rand(()) > 0.5)),
        }

    def step(kept: Any) -> None:
        kept["optimizers"][0].zero_grad()
        kept["model"](torch.ones(1, 3, 5, 5)).sum().backward()
        kept["optimizers"][0].step()

    first, second = made(), made()
    step(first)
    alone(training_after(kept=first)).keep(kept=second)
    tensors = [second["tensors"][0], second["model"].weight]
    for kept in (first, second):
        step(kept)
    torch.testing.assert_close(first["tensors"], second["tensors"], rtol=0, atol=0)
    torch.testing.assert_close(first["model"].weight, second["model"].weight, rtol=0, atol=0)
    for name in ("low", "eight", "flag"):
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
    assert tensors[0].requires_grad
    assert tensors[1] is second["optimizers"][0].param_groups[0]["params"][0]


@needs_torch
def test_a_view_of_a_large_tensor_is_kept_without_the_rest() -> None:
    assert sum(map(len, packed("view", torch.zeros(1 << 16)[:10]))) < 1000


@needs_torch
def test_a_model_of_pytorch_that_does_not_change_is_no_mistake() -> None:
    repl = replicas.NonReplicator()
    repl.keep(frozen={"model": torch.nn.Linear(2, 2), "mean": torch.zeros(2)})
    for _ in repl.run(lambda: 1, steps=2):
        repl._me.training.take()


def test_only_replica_0_saves_what_is_kept(tmp_path: Path) -> None:
    def train(repl: replicas.Replicator) -> None:
        repl.keep(weights=[1, 2])
        list(repl.run(lambda: 1, steps=3))

    options = {"checkpoints": {"replica": lp.Checkpoints(tmp_path)}}
    replicas.MultiWorkerReplicator(2).launch(train, launcher="test_mt", launch_options=options)
    for index, kept in enumerate([{"weights": [1, 2]}, {}]):
        training = Training()
        [folder] = (tmp_path / "replica" / str(index)).glob("*/state")
        training.restore(folder)
        assert kept_in(training) == (3, kept)
        newest = training.newest()
        assert newest is not None
        assert newest.places == [LoopPlace("run", 1, made=3)]


def test_no_save_waits_for_steps_that_do_not_come(tmp_path: Path) -> None:
    repl = replicas.NonReplicator()
    list(repl.run(lambda: 1, steps=3))
    repl._me.training.save(tmp_path)
