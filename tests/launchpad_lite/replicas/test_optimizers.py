"""Optimizers that get gradients as arguments, averaged over the replicas."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from launchpad_lite import replicas
from tests.launchpad_lite.replicas.together import in_memory, returned, together

Params = dict[str, Any]
BATCH, STEPS = 16, 100


class Momentum:
    def __init__(self, params: Params) -> None:
        self.params = params
        self.rate = 0.05
        self.velocity = {name: np.zeros_like(value) for name, value in params.items()}

    def update(self, gradients: Params) -> None:
        for name, gradient in gradients.items():
            self.velocity[name] = 0.9 * self.velocity[name] + gradient
            self.params[name] -= self.rate * self.velocity[name]


class Applies:
    """The same, with another method."""

    def __init__(self, params: Params) -> None:
        self._optimizer = Momentum(params)

    def apply_gradients(self, gradients: Params) -> None:
        self._optimizer.update(gradients)


def apply(optimizer: Any, gradients: Params) -> None:
    for name in ("update", "apply_gradients"):
        if hasattr(optimizer, name):
            getattr(optimizer, name)(gradients)
            return
    optimizer(gradients)


def first_params() -> Params:
    rng = np.random.default_rng(0)
    return {"hidden": rng.normal(size=(3, 8)), "bias": np.zeros(8), "out": rng.normal(size=8)}


def gradients_of(params: Params, inputs: Any, targets: Any) -> Params:
    """Returns the gradient of the mean squared error of a network with one hidden layer."""
    hidden = np.tanh(inputs @ params["hidden"] + params["bias"])
    errors = 2 * (hidden @ params["out"] - targets) / len(inputs)
    inner = np.outer(errors, params["out"]) * (1 - hidden**2)
    return {"hidden": inputs.T @ inner, "bias": inner.sum(0), "out": hidden.T @ errors}


def batches(part: int = 0, parts: int = 1) -> Any:
    for step in range(STEPS):
        inputs = np.random.default_rng(step).normal(size=(BATCH, 3))
        mine = np.split(inputs, parts)[part]
        yield mine, np.sin(mine.sum(1))


def trained_alone(make: Callable[[Params], Any], parts: int) -> Params:
    """Returns the parameters of one process; it adds up gradients of parts of a batch."""
    params = first_params()
    optimizer = make(params)
    for every in zip(*(batches(part, parts) for part in range(parts)), strict=True):
        total, *others = (gradients_of(params, *batch) for batch in every)
        for other in others:
            total = {name: total[name] + other[name] for name in total}
        apply(optimizer, {name: value / parts for name, value in total.items()})
    return params


@pytest.mark.parametrize("make", [Momentum, Applies, lambda params: Momentum(params).update])
@pytest.mark.parametrize("size", [2, 4])
def test_replicas_get_the_parameters_of_one_process(
    make: Callable[[Params], Any], size: int
) -> None:
    def train(repl: replicas.Replicator) -> Params:
        params = first_params()
        optimizer = repl.wrap_optimizer(make(params))

        def step_fn(batch: Any) -> None:
            apply(optimizer, gradients_of(params, *batch))

        for _ in repl.run(step_fn, lambda index: batches(index, repl.num_replicas)):
            pass
        return params

    every = returned(together(in_memory(size), train))
    alone, in_parts = trained_alone(make, 1), trained_alone(make, size)
    for name, value in alone.items():
        np.testing.assert_allclose(every[0][name], value, rtol=1e-9, atol=1e-12)
        for params in every:  # the order of additions is the same: bit by bit
            np.testing.assert_array_equal(params[name], in_parts[name])


def test_a_wrapped_optimizer_shares_its_attributes_with_the_other() -> None:
    optimizer = Momentum(first_params())
    wrapped = replicas.NonReplicator().wrap_optimizer(optimizer)
    wrapped.rate = 0.5
    assert optimizer.rate == 0.5
    assert wrapped.velocity is optimizer.velocity
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapped.nothing


class Transformation(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[..., Any]


def test_a_named_tuple_of_functions_stays_one() -> None:
    plain = Transformation(lambda params: 0, lambda updates, state, params=None: (updates, state))

    def story(repl: replicas.Replicator) -> Any:
        wrapped = repl.wrap_optimizer(plain)
        assert type(wrapped) is Transformation
        by_name = wrapped.update(updates=np.float64(repl.replica_id), state=1)
        return wrapped.update(np.float64(repl.replica_id), 2), by_name

    assert returned(together(in_memory(2), story)) == [((0.5, 2), (0.5, 1))] * 2


@pytest.mark.parametrize("optimizer", [5, {}, Momentum, None])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"wrap_optimizer takes .* not "):
        replicas.NonReplicator().wrap_optimizer(optimizer)


def test_options_of_pytorch_are_refused() -> None:
    with pytest.raises(TypeError, match="only optimizers of PyTorch have options: bucket_mb"):
        replicas.NonReplicator().wrap_optimizer(lambda gradients: None, bucket_mb=1)
