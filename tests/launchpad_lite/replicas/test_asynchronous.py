"""Asynchronous replicas: parameters on servers, and nobody waits for others."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import launchpad_lite as lp
from launchpad_lite import engines, replicas
from launchpad_lite.testing import Fault, Monkey, poll_until
from tests.engines import needs_torch

if TYPE_CHECKING:
    import collections

Batch = tuple[Any, Any]

WEIGHTS = np.array([1.0, -2.0, 3.0])


class Momentum:
    """As users write optimizers for numpy."""

    def __init__(self, rate: float = 0.02) -> None:
        self._rate = rate

    def init(self, parameters: Any) -> Any:
        return {name: np.zeros_like(value) for name, value in parameters.items()}

    def update(self, gradients: Any, state: Any, parameters: Any) -> Any:
        state = {name: 0.5 * state[name] + gradients[name] for name in gradients}
        return {name: -self._rate * state[name] for name in state}, state


def batches(replica_id: int) -> Callable[[], Batch]:
    random = np.random.default_rng(replica_id)

    def batch() -> Batch:
        features = random.normal(size=(16, 3))
        return features, features @ WEIGHTS + 0.5

    return batch


def regress(
    repl: Any, steps: int | None = 60, slow_s: float = 0.0, input_fn: Callable[..., Any] = batches
) -> Any:
    """Finds the weights, with numpy; returns them, and how stale the updates were."""
    parameters = {"weights": np.full(3, float(repl.replica_id)), "bias": np.zeros(1)}
    optimizer = repl.wrap_optimizer(Momentum(), parameters)
    state = optimizer.init(parameters)

    def step_fn(batch: Batch) -> float:
        nonlocal state
        if slow_s:
            time.sleep(slow_s * (8 if repl.replica_id == 0 else 1))
        features, targets = batch
        errors = features @ parameters["weights"] + parameters["bias"] - targets
        gradients = {  # in another order, as JAX gives them
            "bias": np.array([2 * errors.mean()]),
            "weights": 2 * features.T @ errors / len(errors),
        }
        updates, state = optimizer.update(gradients, state, parameters)
        for name in parameters:
            parameters[name] += updates[name]
        return float((errors**2).mean())

    made = 0
    for results in repl.run(step_fn, input_fn, steps=steps):
        assert len(results) == 1
        made += 1
    return parameters, repl.staleness(), made


@pytest.mark.parametrize("servers", [1, 2])
def test_replicas_find_the_weights_together(servers: int) -> None:
    repl = replicas.MultiWorkerAsyncReplicator(3, servers=servers)
    results = repl.launch(regress, launcher="test_mt")
    for parameters, _, _ in results:
        np.testing.assert_allclose(parameters["weights"], WEIGHTS, atol=0.02)
        np.testing.assert_allclose(parameters["bias"], 0.5, atol=0.02)
    made = sum(made for _, _, made in results)
    assert 180 <= made <= 182


def mean_of(staleness: "collections.Counter[int]") -> float:
    return sum(stale * count for stale, count in staleness.items()) / staleness.total()


@pytest.mark.slow
@pytest.mark.serial
def test_updates_are_staler_with_asp_than_with_psp_and_with_psp_than_with_bsp() -> None:
    seen = {}
    for barrier in (engines.BSP(), engines.PSP(1, resample=0.003), engines.ASP()):
        repl = replicas.MultiWorkerAsyncReplicator(6, barrier=barrier)
        results = repl.launch(regress, 20, slow_s=0.003, launcher="test_mt")
        seen[barrier] = max((each for _, each, _ in results), key=lambda each: each.total())
        assert seen[barrier].total() >= 120
    bsp, psp, asp = seen.values()
    # All six read the same, and are applied one after the other.
    assert max(bsp) <= 5
    assert mean_of(bsp) < mean_of(psp) <= mean_of(asp)
    assert max(bsp) < max(psp)


def call_collectives(repl: Any) -> None:
    for name in ("all_reduce", "all_sum", "all_gather", "broadcast", "map_reduce", "map_gather"):
        arguments = (len, [[1]]) if name.startswith("map") else ([1],)
        message = f"^replica 0: .*AsyncReplicator has no {name}, .* MultiWorkerReplicator has it"
        with pytest.raises(replicas.UnsupportedCollectiveError, match=message):
            getattr(repl, name)(*arguments)


def test_collectives_are_refused_and_the_error_says_who_has_them() -> None:
    replicas.MultiWorkerAsyncReplicator(1).launch(call_collectives, launcher="test_mt")


def test_numbers_and_barriers_are_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="at least 1 of servers, not 0"):
        replicas.MultiWorkerAsyncReplicator(2, servers=0)
    with pytest.raises(ValueError, match="at least 1 of workers, not 0"):
        replicas.MultiWorkerAsyncReplicator(0)
    with pytest.raises(TypeError, match=r"barrier is an object, as ASP\(\.\.\.\)"):
        replicas.MultiWorkerAsyncReplicator(2, barrier=engines.ASP)  # type: ignore[arg-type]


def alternate(repl: Any) -> Any:
    """Two optimizers, of which each pulls at the other's parameter, as in a GAN."""
    left, right = {"x": np.array([4.0])}, {"x": np.array([-3.0])}
    first, second = (repl.wrap_optimizer(Momentum(0.05), each) for each in (left, right))

    def step_fn() -> None:
        first.update({"x": left["x"] - right["x"] - 1}, (), left)
        second.update({"x": right["x"] + left["x"] - 3}, (), right)
        second.update({"x": right["x"] + left["x"] - 3}, (), right)

    for _ in repl.run(step_fn, steps=150):
        pass
    return left["x"].item(), right["x"].item(), repl.staleness().total(), repl.step


def test_several_optimizers_step_in_one_step() -> None:
    repl = replicas.MultiWorkerAsyncReplicator(2, servers=2)
    for left, right, updates, step in repl.launch(alternate, launcher="test_mt"):
        assert left == pytest.approx(2, abs=0.01)
        assert right == pytest.approx(1, abs=0.01)
        assert 598 <= updates <= 602
        assert 149 <= step <= 150


def go_through_epochs(repl: Any) -> int:
    parameters = {"x": np.zeros(1)}
    optimizer = repl.wrap_optimizer(Momentum(), parameters)
    for _ in repl.epochs(3):
        for _ in repl.run(lambda: optimizer.update({"x": np.ones(1)}, (), parameters), steps=4):
            pass
    return repl.step


def test_each_epoch_has_steps_of_its_own() -> None:
    steps = replicas.MultiWorkerAsyncReplicator(2).launch(go_through_epochs, launcher="test_mt")
    assert all(step >= 11 for step in steps)


def keep_own(repl: Any) -> Any:
    parameters = {"x": np.array([float(repl.replica_id)])}
    frozen, seen = {"seed": repl.replica_id}, []
    repl.keep(frozen=frozen)
    optimizer = repl.wrap_optimizer(Momentum(), parameters)

    def step_fn(batch: int) -> int:
        seen.append(batch)
        optimizer.update({"x": np.zeros(1)}, (), parameters)
        return batch

    results = list(repl.run(step_fn, lambda index: range(index, index + 5)))
    return parameters["x"].item(), frozen, seen, results


def test_replicas_begin_as_replica_0_and_end_with_their_inputs() -> None:
    results = replicas.MultiWorkerAsyncReplicator(2).launch(keep_own, launcher="test_mt")
    for index, (x, frozen, seen, yielded) in enumerate(results):
        assert x == 0.0
        assert frozen == {"seed": 0}
        assert seen == list(range(index, index + 5))
        assert yielded == [[each] for each in seen]


class Slow(Momentum):
    """Takes long to be in a checkpoint."""

    def __getstate__(self) -> Any:
        time.sleep(0.1)
        return self.__dict__


def begin_early(repl: Any) -> float:
    parameters = {"x": np.zeros(1)}
    optimizer = repl.wrap_optimizer(Slow(), parameters)
    for _ in repl.run(lambda: optimizer.update({"x": np.ones(1)}), steps=2):
        pass
    return parameters["x"].item()


def test_a_replica_waits_until_the_keys_of_replica_0_are_known(tmp_path: Path) -> None:
    options = {"checkpoints": {"replica_server": lp.Checkpoints(tmp_path)}}
    repl = replicas.MultiWorkerAsyncReplicator(2)
    assert all(x < 0 for x in repl.launch(begin_early, launcher="test_mt", launch_options=options))


def say(repl: Any, what: str) -> str:
    if repl.replica_id:
        lp.wait_for_stop(0.2)  # so long, there is none but that of the program before
    return what


def test_results_are_those_of_this_program_not_of_its_checkpoint(tmp_path: Path) -> None:
    options = {"checkpoints": {"replica_server": lp.Checkpoints(tmp_path)}}
    repl = replicas.MultiWorkerAsyncReplicator(2)
    for what in ("before", "now"):
        assert repl.launch(say, what, launcher="test_mt", launch_options=options) == [what] * 2


def differ(repl: Any) -> None:
    parameters = {"x": np.zeros(2 + repl.replica_id)}
    optimizer = repl.wrap_optimizer(Momentum(), parameters)
    for _ in repl.run(lambda: optimizer.update(parameters, (), parameters), steps=5):
        pass


def test_replicas_with_different_models_fail() -> None:
    message = r"Momentum has other parameters on the servers: of shapes \(2,\), not \(3,\)"
    with pytest.raises(lp.NodeFailedError, match=message):
        replicas.MultiWorkerAsyncReplicator(2).launch(differ, launcher="test_mt")


def wrap_wrongly(repl: Any, what: str) -> None:
    parameters = {"x": np.zeros(2)}
    if what == "no optimizer":
        repl.wrap_optimizer(object())
    if what == "no parameters":
        repl.wrap_optimizer(Momentum())
    if what == "options":
        repl.wrap_optimizer(Momentum(), parameters, every=2)
    optimizer = repl.wrap_optimizer(Momentum(), parameters)
    if what == "shared":
        repl.wrap_optimizer(Momentum(), {"y": parameters["x"]})
    optimizer.update({"x": np.zeros(3)} if what == "shapes" else {"y": np.zeros(2)})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no optimizer", "takes an optimizer of PyTorch, or one with init"),
        ("no parameters", "a dict or list of arrays, not NoneType"),
        ("options", "has no option every of optimizers"),
        ("shared", "Momentum has parameters of another optimizer"),
        ("names", r"are nested as the parameters are: \['x'\]; not \['y'\]"),
        ("shapes", r"gradients of shapes \(3,\) for parameters of shapes \(2,\)"),
    ],
)
def test_what_is_wrapped_is_checked(what: str, message: str) -> None:
    with pytest.raises(lp.NodeFailedError, match=message):
        replicas.MultiWorkerAsyncReplicator(1).launch(wrap_wrongly, what, launcher="test_mt")


class Learner:
    """Serves what it has learned, while it learns."""

    def __init__(self, repl: Any) -> None:
        self._repl = repl
        self._parameters = {"x": np.zeros(1)}

    def value(self) -> float:
        return float(self._parameters["x"][0])

    def run(self) -> None:
        optimizer = self._repl.wrap_optimizer(Momentum(), self._parameters)
        for _ in self._repl.run(lambda: optimizer.update({"x": -np.ones(1)})):
            pass


def watch(learner: Any) -> None:
    poll_until(lambda: learner.value() > 1)
    lp.stop()


def test_replicas_are_part_of_a_program_and_serve_their_methods() -> None:
    program = lp.Program("part")
    learner = replicas.MultiWorkerAsyncReplicator(2).add_to(program, Learner, label="learner")
    program.add_node(lp.PyNode(watch, learner), label="watch")
    assert "learner_server" in program.groups
    lp.launch(program, "test_mt").wait(10)


class Killed:
    """A replica that is killed on its way, once."""

    def __init__(self, repl: Any, folder: Path) -> None:
        self._repl = repl
        self._folder = folder

    def run(self) -> Any:
        victim = self._repl.replica_id == 1 and lp.restart_count() == 0

        def input_fn(replica_id: int, step: int) -> Callable[[], Batch]:
            (self._folder / f"{replica_id}-{lp.restart_count()}").write_text(str(step))
            source, taken = batches(replica_id), itertools.count()

            def batch() -> Batch:
                if next(taken) >= 10 and victim:  # of its own: it may have started late
                    os._exit(9)
                time.sleep(0.01)
                return source()

            return batch

        return regress(self._repl, 80, input_fn=input_fn)


@pytest.mark.slow
@pytest.mark.parametrize("barrier", [engines.ASP(), engines.BSP()], ids=str)
def test_a_replica_that_is_killed_comes_back_and_goes_on(
    barrier: engines.Barrier, tmp_path: Path
) -> None:
    repl = replicas.MultiWorkerAsyncReplicator(3, servers=2, barrier=barrier)
    options = {"restart": {"replica": "on_failure"}}
    results = repl.launch(Killed, tmp_path, launcher="test_mp", launch_options=options)
    for parameters, staleness, _ in results:
        np.testing.assert_allclose(parameters["weights"], WEIGHTS, atol=0.02)
        assert staleness.total() >= 240
    assert int((tmp_path / "1-1").read_text()) > 0  # goes on with its input


@pytest.mark.slow
def test_servers_that_are_killed_come_back_with_their_checkpoint(tmp_path: Path) -> None:
    program = lp.Program("servers")
    repl = replicas.MultiWorkerAsyncReplicator(2)
    repl.add_to(program, slowly, tmp_path)
    running = lp.launch(
        program,
        "test_mp",
        restart={
            "replica_server": lp.RestartPolicy("on_failure", max_restarts=100, max_backoff_s=0.2)
        },
        checkpoints={"replica_server": lp.Checkpoints(tmp_path / "checkpoints", period_s=0.1)},
    )
    poll_until(lambda: len(list(tmp_path.glob("*.begun"))) == 2)
    with Monkey(
        running, seed=1, faults=(Fault.KILL,), labels=["replica_server"], mean_interval_s=0.5
    ) as monkey:
        poll_until(lambda: len(monkey.injected) >= 2, timeout_s=60)
    (tmp_path / "end").touch()
    running.wait()
    for replica in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"{replica}.npy"), WEIGHTS, atol=0.05)


def slowly(repl: Any, folder: Path) -> None:
    def input_fn(replica_id: int) -> Iterator[Batch]:
        source = batches(replica_id)
        left = 100
        while left:
            left -= (folder / "end").exists()
            time.sleep(0.002)
            yield source()
            (folder / f"{replica_id}.begun").touch()

    parameters, _, _ = regress(repl, None, input_fn=input_fn)
    np.save(folder / f"{repl.replica_id}.npy", parameters["weights"])


def regress_with_torch(repl: Any, make: Callable[[Any], Any], steps: int) -> Any:
    import torch

    with repl.context():
        torch.manual_seed(repl.replica_id)
        model = torch.nn.Linear(3, 1)
        optimizers = [repl.wrap_optimizer(each) for each in make(model)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, steps // 2, 0.2) for each in optimizers]
    repl.keep(model=model)

    def step_fn(batch: Batch) -> float:
        features, targets = (torch.as_tensor(each, dtype=torch.float32) for each in batch)
        loss = ((model(features)[:, 0] - targets) ** 2).mean()
        model.zero_grad()
        loss.backward()
        for each in (*optimizers, *schedulers):
            each.step()
        return loss.item()

    for _ in repl.run(step_fn, batches, steps=steps):
        pass
    assert not any(each.state for each in optimizers)  # it is on the servers
    weights = [parameter.detach().numpy().ravel() for parameter in model.parameters()]
    return np.concatenate(weights), repl.staleness()


def sgd(model: Any) -> Any:
    import torch

    return [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)]


def one_each(model: Any) -> Any:
    import torch

    return [torch.optim.SGD([each], lr=0.02, momentum=0.5) for each in model.parameters()]


def adam(model: Any) -> Any:
    import torch

    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    return [torch.optim.Adam(groups, lr=0.05)]


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "steps", "servers", "launcher"),
    [
        (sgd, 80, 2, "test_mp"),
        (sgd, 80, 1, "test_mt"),
        (adam, 120, 2, "test_mt"),
        (one_each, 80, 2, "test_mt"),
    ],
)
def test_replicas_of_pytorch_find_the_weights_together(
    make: Callable[[Any], Any], steps: int, servers: int, launcher: str
) -> None:
    repl = replicas.MultiWorkerAsyncReplicator(3, servers=servers)
    for weights, staleness in repl.launch(regress_with_torch, make, steps, launcher=launcher):
        np.testing.assert_allclose(weights, [*WEIGHTS, 0.5], atol=0.03)
        # The first server has all; an update of each replica may be on its way to another one.
        assert staleness.total() >= 3 * steps * servers - 3 * (servers - 1)


@needs_torch
@pytest.mark.slow
def test_one_replica_of_pytorch_does_what_the_optimizer_does_alone() -> None:
    import torch

    ((weights, _),) = replicas.MultiWorkerAsyncReplicator(1, servers=2).launch(
        regress_with_torch, adam, 30, launcher="test_mt"
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    (optimizer,) = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 15, 0.2)
    batch = batches(0)
    for _ in range(30):
        features, targets = (torch.as_tensor(each, dtype=torch.float32) for each in batch())
        optimizer.zero_grad()
        ((model(features)[:, 0] - targets) ** 2).mean().backward()
        optimizer.step()
        scheduler.step()
    expected = [parameter.detach().numpy().ravel() for parameter in model.parameters()]
    assert weights.tolist() == np.concatenate(expected).tolist()
