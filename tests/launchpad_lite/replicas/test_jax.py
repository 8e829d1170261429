"""Arrays of JAX in all replicators, and TpuReplicator on virtual CPU devices."""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from launchpad_lite import replicas
from launchpad_lite.replicas import _devices
from launchpad_lite.replicas._mailbox import Box
from launchpad_lite.replicas._memory_carrier import JaxCarrier, JaxMesh, MemoryCarrier
from launchpad_lite.replicas._packing import Packed
from tests.engines import needs_jax
from tests.launchpad_lite.conftest import Run
from tests.launchpad_lite.replicas.together import Carriers, in_memory, returned, together

pytestmark = [pytest.mark.slow, needs_jax]

BATCH, STEPS = 16, 100
OPS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "product": np.prod}


@pytest.fixture(scope="module", autouse=True)
def devices() -> Any:
    """Virtual CPU devices: before any other test of this module uses JAX."""
    return _devices.of_jax(8)


@functools.cache
def mesh(size: int) -> JaxMesh:
    return JaxMesh(_devices.of_jax(size))


def on_devices(size: int, processes: int = 1) -> Carriers:
    """Returns carriers of replicas; with several processes, as if these were such."""
    outer, threads = Box(), size // processes
    found: list[Any] = []
    for process in range(processes):
        box, between = Box(), MemoryCarrier(process, processes, outer)
        found += [JaxCarrier(index, mesh(threads), box, between) for index in range(threads)]
    return found


def run_on_devices(size: int, story: Callable[[Any], Any], processes: int = 1) -> list[Any]:
    """Runs a story in replicas, each of which has its device."""
    own = _devices.of_jax(size // processes)

    def around(rank: int) -> Any:
        return _devices.on_device_of_jax(own[rank % len(own)])

    return together(on_devices(size, processes), story, around)


def run_in_memory(size: int, story: Callable[[Any], Any]) -> list[Any]:
    """Runs a story in replicas whose arrays are copied to the host, as by all other replicators."""
    return together(in_memory(size), story)


# Collectives on devices


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from([(2, 1), (3, 1), (8, 1), (4, 2)]),
    st.sampled_from(
        [(op, dtype) for op in OPS for dtype in ("float32", "int32", "bfloat16")]
        + [(op, "bool") for op in ("max", "min", "mean")]
    ),
    st.sampled_from([(), (1,), (3, 2), (2, 0)]),
    st.integers(0, 99),
)
def test_all_reduce_is_what_numpy_says(
    group: tuple[int, int], kind: tuple[Any, str], shape: tuple[int, ...], seed: int
) -> None:
    import jax.numpy as jnp

    op, dtype = kind
    rng = np.random.default_rng(seed)
    each = rng.integers(-3, 4, size=(group[0], *shape))

    def story(repl: replicas.Replicator) -> Any:
        mine = each[repl.replica_id]
        result = repl.all_reduce({"jax": jnp.asarray(mine, dtype), "numpy": mine + 0.5}, op)
        assert result["jax"].devices() == jnp.zeros(1).devices()
        return result

    results = returned(run_on_devices(group[0], story, group[1]))
    values = np.asarray(each, bool if dtype == "bool" else float)
    expected = OPS[op](values, axis=0)
    for result in results:
        found = result["jax"]
        if op != "mean":
            assert found.dtype == dtype
        tolerance = 0.02 if dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(np.asarray(found, float), expected, tolerance, tolerance)
        np.testing.assert_allclose(result["numpy"], OPS[op](each + 0.5, axis=0), 1e-12)
        np.testing.assert_array_equal(found, results[0]["jax"])  # bit by bit


@pytest.mark.parametrize("group", [(2, 1), (4, 2)])
def test_large_values_of_small_types_are_combined_or_an_error(group: tuple[int, int]) -> None:
    import jax.numpy as jnp

    def story(repl: replicas.Replicator) -> Any:
        half, eighth = jnp.full(2, 40_000, "float16"), jnp.full(2, 256, "float8_e4m3fn")
        means = repl.all_reduce([half, eighth], "mean")
        with pytest.raises(OverflowError, match="the sum over the replicas is too large for int32"):
            repl.all_sum(jnp.full(2, 2**30, "int32"))
        return [(str(each.dtype), np.asarray(each, float).tolist()) for each in means]

    expected = [("float16", [40_000.0] * 2), ("float8_e4m3fn", [256.0] * 2)]
    assert returned(run_on_devices(group[0], story, group[1])) == [expected] * group[0]


@settings(deadline=None, max_examples=15)
@given(st.sampled_from([(2, 1), (5, 1), (8, 1), (4, 2)]), st.data())
def test_broadcast_and_all_gather_give_what_others_have(
    group: tuple[int, int], data: st.DataObject
) -> None:
    import jax.numpy as jnp

    source = data.draw(st.integers(0, group[0] - 1))

    def story(repl: replicas.Replicator) -> Any:
        rank = repl.replica_id
        own = jnp.zeros(1).devices()
        sent = repl.broadcast({"a": jnp.full((2, 2), rank, "bfloat16"), "b": rank}, source)
        gathered = repl.all_gather({"ragged": jnp.arange(rank + 1)})
        assert sent["a"].devices() == own
        assert all(each["ragged"].devices() == own for each in gathered)
        return sent, gathered

    for sent, gathered in returned(run_on_devices(group[0], story, group[1])):
        np.testing.assert_array_equal(np.asarray(sent["a"], float), np.full((2, 2), source))
        assert sent["b"] == source
        for rank, each in enumerate(gathered):
            np.testing.assert_array_equal(each["ragged"], np.arange(rank + 1))


def test_arrays_that_their_owner_gives_away_arrive() -> None:
    import jax
    import jax.numpy as jnp

    spend = jax.jit(lambda x: x + 100, donate_argnums=0)

    def story(repl: replicas.Replicator) -> Any:
        found = 0.0
        for step in range(20):
            mine = jnp.full(1000, repl.replica_id + step, "float32")
            sent, total = repl.broadcast(mine, step % 2), repl.all_sum(mine)
            spend(mine)
            found += float(total[-1])
            if repl.replica_id != step % 2:
                assert sent[0] == step % 2 + step
        return found

    expected = float(sum(2 * step + 1 for step in range(20)))
    assert returned(run_on_devices(2, story)) == [expected] * 2


def test_an_array_with_and_without_jax_is_a_mismatch() -> None:
    import jax.numpy as jnp

    def story(repl: replicas.Replicator) -> Any:
        return repl.all_sum(jnp.zeros(2) if repl.replica_id else np.zeros(2, "float32"))

    for error in run_on_devices(3, story):
        assert isinstance(error, replicas.CollectiveMismatchError)
        assert "replica 0 calls something else" in str(error)
        assert "jax float32[2]" in str(error)


@pytest.mark.parametrize("where", [on_devices, in_memory])
def test_what_has_no_meaning_is_refused(where: Callable[[int], Carriers]) -> None:
    import jax
    import jax.numpy as jnp

    def story(repl: replicas.Replicator) -> None:
        with pytest.raises(TypeError, match="the sum of booleans"):
            repl.all_sum(jnp.array(True))
        with pytest.raises(TypeError, match="complex numbers have no order"):
            repl.all_reduce(jnp.zeros(2, complex), "max")
        with pytest.raises(TypeError, match=r"key"):
            repl.all_sum(jax.random.key(1))

    returned(together(where(2), story))


# Arrays of JAX in other replicators


def test_arrays_keep_dtype_and_device_when_they_are_packed(devices: Any) -> None:
    import jax
    import jax.numpy as jnp

    nest = {
        "bfloat16": jnp.arange(3, dtype="bfloat16") / 3,
        "elsewhere": jax.device_put(jnp.float32(1.5), devices[3]),
        "flags": jnp.array([True, False]),
        "split": jax.device_put(
            jnp.arange(4), jax.NamedSharding(jax.make_mesh((2,), ("x",)), jax.P("x"))
        ),
    }
    back = Packed(nest).unpacked()
    for name, leaf in nest.items():
        assert back[name].dtype == leaf.dtype
        assert back[name].sharding == leaf.sharding
        np.testing.assert_array_equal(back[name], leaf)


def test_means_of_integers_are_floats_of_jax() -> None:
    import jax.numpy as jnp

    mean = returned(
        together(
            in_memory(2), lambda repl: repl.all_reduce(jnp.arange(2) + repl.replica_id, "mean")
        )
    )[0]
    assert mean.dtype == "float32"  # numpy's float64 is none of JAX by default
    np.testing.assert_array_equal(mean, [0.5, 1.5])


def test_a_collective_in_a_compiled_function_says_what_to_do() -> None:
    import jax
    import jax.numpy as jnp
    import optax

    repl = replicas.NonReplicator()
    optimizer = repl.wrap_optimizer(optax.sgd(0.1))
    state = optimizer.init(jnp.zeros(2))
    with pytest.raises(TypeError, match=r"under jax.jit .* outside of jax.jit, call"):
        jax.jit(optimizer.update)(jnp.ones(2), state)
    with pytest.raises(TypeError, match=r"under jax.jit"):
        jax.jit(repl.all_sum)(jnp.ones(2))
    np.testing.assert_allclose(optimizer.update(jnp.ones(2), state)[0], [-0.1, -0.1])


# Training


def first_params() -> Any:
    import jax.numpy as jnp

    return {"weights": jnp.asarray([1.0, -2.0, 0.5]), "bias": jnp.zeros(1)}


def loss_of(params: Any, inputs: Any, targets: Any) -> Any:
    return ((inputs @ params["weights"] + params["bias"] - targets) ** 2).mean()


def batches(part: int = 0, parts: int = 1) -> Any:
    for step in range(STEPS):
        inputs = np.random.default_rng(step).normal(size=(BATCH, 3)).astype(np.float32)
        mine = np.split(inputs, parts)[part]
        yield mine, np.sin(mine.sum(1))


def trained(repl: replicas.Replicator, optimizer: Any) -> Any:
    import jax
    import optax

    gradients_of, apply_updates = jax.jit(jax.grad(loss_of)), jax.jit(optax.apply_updates)
    params = first_params()
    optimizer = repl.wrap_optimizer(optimizer)
    state = optimizer.init(params)

    def step_fn(batch: Any) -> None:
        nonlocal params, state
        updates, state = optimizer.update(gradients_of(params, *batch), state, params)
        params = apply_updates(params, updates)

    for _ in repl.run(step_fn, lambda index: batches(index, repl.num_replicas)):
        pass
    return params


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize(("size", "run"), [(4, run_on_devices), (2, run_in_memory)])
def test_replicas_get_the_parameters_of_one_process(name: str, size: int, run: Any) -> None:
    import jax
    import optax

    options = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = getattr(optax, name)(0.01, **options)
    optimizer = optimizer._replace(update=jax.jit(optimizer.update))  # after the mean
    alone = trained(replicas.NonReplicator(), optimizer)
    every = returned(run(size, lambda repl: trained(repl, optimizer)))
    for params in every:
        for part, found in params.items():
            np.testing.assert_allclose(found, alone[part], rtol=1e-5, atol=2e-6)
            np.testing.assert_array_equal(found, every[0][part])  # bit by bit


def test_batches_are_made_on_the_device_of_the_replica(devices: Any) -> None:
    import jax.numpy as jnp

    def story(repl: Any) -> Any:
        def input_fn(index: int) -> Any:
            for number in range(5):
                time.sleep(0.002)  # so long that a thread fetches the later ones
                yield jnp.full(2, number)

        return [*repl.run(lambda batch: next(iter(batch.devices())).id, input_fn)]

    assert returned(run_on_devices(2, story)) == [[[0, 1]] * 5] * 2


@pytest.mark.parametrize("op", OPS)
def test_idle_replicas_are_left_out(op: Any) -> None:
    import jax.numpy as jnp

    def story(repl: Any) -> Any:
        def step_fn(values: Any) -> Any:
            return repl.all_reduce([values, jnp.maximum(values, -9).astype(int)], op)

        return [*repl.run(step_fn, values, uneven="join")]

    def values(index: int) -> Any:
        return [jnp.array([2.0 + index, -jnp.inf]), jnp.array([5.0, -3.0])][: 1 + index % 2]

    for first, second in returned(run_on_devices(3, story)):
        assert first[0][0][0] == pytest.approx(OPS[op]([2, 3, 4]))
        np.testing.assert_allclose(second, [[[5, -3]] * 2])


def test_the_mean_without_idle_replicas_is_that_of_any_type() -> None:
    import jax.numpy as jnp

    def story(repl: Any) -> Any:
        def step_fn(values: Any) -> Any:
            return repl.all_reduce([values, values > 0], "mean")

        return [*repl.run(step_fn, values, uneven="join")]

    def values(index: int) -> Any:
        return [jnp.full(1, 40_000, jnp.float16)] * (1 + (index > 0))

    for _, second in returned(run_on_devices(3, story)):
        assert [float(leaf[0]) for leaf in second[0]] == [40_000, 1]


# What is kept


def going_on(**kept: Any) -> replicas.Replicator:
    """Returns the replica of a training that goes on."""
    repl = replicas.NonReplicator()
    repl._me.training.kept = kept
    repl._me.training.take()
    return repl


def test_arrays_of_jax_that_steps_replace_are_found() -> None:
    import jax.numpy as jnp

    def run(kept: Any, step: Callable[[], None]) -> None:
        repl = replicas.NonReplicator()
        repl.keep(params=kept)
        repl._me.training.take()
        for _ in repl.run(step, steps=1):
            repl._me.training.take()

    params = {"w": jnp.zeros(2)}
    with pytest.raises(
        replicas.ReplicaError, match=r"params has the arrays of JAX that it had when"
    ):
        run(params, lambda: None)
    run(params, lambda: params.update(w=params["w"] + 1))


def test_arrays_of_jax_in_a_state_are_kept() -> None:
    import jax.numpy as jnp

    repl = replicas.NonReplicator()
    state = repl.state(params={"w": jnp.zeros(2)}, best=(0.0, jnp.zeros(1)))
    state.params = {"w": state.params["w"] + 1}
    repl = going_on(state=state)
    state = repl.state(params={"w": jnp.zeros(2)}, best=(0.0, jnp.zeros(1)))
    assert state.params["w"].tolist() == [1.0, 1.0]


# TpuReplicator in a program

LEARNER = """
import sys, threading
import numpy as np
import launchpad_lite as lp
from launchpad_lite import replicas

def train(repl, scale):
    import jax, jax.numpy as jnp, optax
    with repl.logical_device(1) as second:
        assert jnp.zeros(2).devices() == {second}
    with repl.context() as device:
        weights = jnp.zeros(2)
    assert weights.devices() == {device} == jnp.zeros(2).devices()
    optimizer = repl.wrap_optimizer(optax.sgd(0.1))
    state = {"weights": weights, "optimizer": optimizer.init(weights)}
    repl.keep(**{"state": state})

    @jax.jit
    def gradients_of(weights, inputs, targets):
        return jax.grad(lambda w: ((inputs @ w - targets) ** 2).mean())(weights)

    def input_fn(index):
        assert index == repl.worker_id, "one pipeline for all replicas of a worker"
        rng = np.random.default_rng(index)
        for _ in range(100):
            inputs = rng.normal(size=(16, 2)).astype(np.float32)
            yield inputs, scale * inputs.sum(1)

    def step_fn(batch):
        assert len(batch[0]) == 16 // repl.replicas_per_worker
        updates, state["optimizer"] = optimizer.update(
            gradients_of(state["weights"], *batch), state["optimizer"])
        state["weights"] = optax.apply_updates(state["weights"], updates)
        return state["weights"].sum()

    for sums in repl.run(step_fn, input_fn):
        assert len(set(map(float, sums))) == 1, sums
    return repl.replica_id, device.id, np.asarray(state["weights"]).round(3).tolist()
"""


@pytest.mark.parametrize(("workers", "cores"), [(1, 8), (2, 4)])
def test_replicas_are_threads_with_devices_and_equal_parameters(
    run_script: Run, workers: int, cores: int
) -> None:
    result = run_script(
        LEARNER
        + f"""
if __name__ == "__main__":
    repl = replicas.TpuReplicator({workers}, {cores}, num_tpu_cores_per_replica=2)
    print(repl.launch(train, 2.0))
"""
    )
    assert result.returncode == 0, result.stderr
    expected = [(rank, 2 * rank % cores, [2.0, 2.0]) for rank in range(4)]
    assert str(expected) in result.stdout
    notice = f"there is no TPU here; {cores} virtual CPU devices of JAX take its place"
    assert (result.stdout + result.stderr).count(notice) == workers


def test_other_nodes_call_the_object_of_replica_0(run_script: Run) -> None:
    result = run_script(
        """
import launchpad_lite as lp
from launchpad_lite import replicas

class Learner:
    def __init__(self, repl):
        self.repl = repl
    def run(self):
        import jax.numpy as jnp
        self.total = int(self.repl.all_sum(jnp.int32(self.repl.replica_id)))
        self.repl.all_gather(None)
        lp.wait_for_stop()
    def who(self):
        return self.repl.replica_id, self.repl.num_replicas

class Caller:
    def __init__(self, learner):
        self.learner = learner
    def run(self):
        print("learner says", self.learner.who())
        lp.stop()

if __name__ == "__main__":
    program = lp.Program("p")
    learner = replicas.TpuReplicator(1, 3).add_to(program, Learner, label="learner")
    program.add_node(lp.CourierNode(Caller, learner), label="caller")
    lp.launch(program, "local_mp").wait()
"""
    )
    assert result.returncode == 0, result.stderr
    assert "learner says (0, 3)" in result.stdout


def test_a_restart_goes_on_with_arrays_of_arguments_and_checkpoints(run_script: Run) -> None:
    result = run_script(
        """
import pathlib
import launchpad_lite as lp
from launchpad_lite import replicas

def train(repl, first, folder):
    import numpy as np
    state = {"sum": first, "count": np.zeros(1)}
    repl.keep(state=state)
    start = repl.step
    def step_fn():
        if lp.restart_count() == 0 and repl.replica_id == 1 and list(folder.glob("*/*/*/state*")):
            raise ValueError("bad luck")
        state["sum"] += repl.all_sum(first * 0 + 1)
        state["count"] += repl.all_sum(1)
    goes_on = lambda index: iter(range(10_000_000 if lp.restart_count() == 0 else start + 10))
    for _ in repl.run(lambda _: step_fn(), goes_on):
        pass
    assert start > 0
    assert repl.step == start + 10
    assert state["count"] == 2 * repl.step == state["sum"], state
    return repl.report.losses

if __name__ == "__main__":
    import jax.numpy as jnp
    folder = pathlib.Path("checkpoints").resolve()
    repl = replicas.TpuReplicator(1, 2, input_replication=replicas.InputReplication.PER_REPLICA)
    print(repl.launch(train, jnp.zeros(1), folder, launch_options={
        "restart": {"replica": "on_failure"},
        "checkpoints": {"replica": lp.Checkpoints(folder, period_s=0.3)},
    }))
"""
    )
    assert result.returncode == 0, result.stderr
    assert "[1, 1]" in result.stdout
    assert "replica 1 of replica: ValueError: bad luck" in result.stdout


def test_jax_that_was_used_before_the_replicas_says_what_to_do(run_script: Run) -> None:
    result = run_script(
        """
from launchpad_lite import replicas

def train(repl):
    pass

if __name__ == "__main__":
    import jax
    jax.devices()
    replicas.TpuReplicator(1, 4).launch(train, launcher="local_mt")
"""
    )
    assert result.returncode != 0
    assert "JAX has 1 cpu device(s) in this process, and 4 are needed" in result.stderr
    assert "JAX_NUM_CPU_DEVICES=4" in result.stderr
