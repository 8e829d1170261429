"""Gradients flow through collectives on tensors of PyTorch."""

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest

from launchpad_lite.replicas import _payload, _torch_functions as functions
from launchpad_lite.replicas._carrier import Carrier, CollectiveCall
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._torch_optimizer import wrap
from tests.engines import needs_torch
from tests.launchpad_lite.replicas.carriers import courier_carriers, one_machine, run as run_all
from tests.launchpad_lite.replicas.torch_replicas import run_replicas

with contextlib.suppress(ImportError):
    import torch

pytestmark = needs_torch

SIZES = [1, 2, 3]


def values(rank: int, rows: int = 2) -> Any:
    drawn = np.random.default_rng(rank).uniform(0.5, 1.5, (rows, 3))
    return torch.from_numpy(drawn).requires_grad_()


def run(size: int, function: Any) -> list[Any]:
    if size == 1:
        return [function(Collectives(Carrier()))]
    return run_replicas(size, function)


def assert_gradients(size: int, in_replica: Any, of_all: Any, rows: Any = lambda _: 2) -> None:
    """Checks the gradient of the sum of all losses against that of one process.

    Args:
        size: How many replicas.
        in_replica: Returns the loss of a replica, for its collectives and tensor.
        of_all: Returns the loss of a replica, for its rank and the tensors of all.
        rows: Of the tensor of each replica.
    """

    def gradient(collectives: Collectives) -> Any:
        mine = values(collectives.rank, rows(collectives.rank))
        in_replica(collectives, mine).backward()
        return mine.grad.numpy()

    everything = [values(rank, rows(rank)) for rank in range(size)]
    sum(of_all(rank, everything) for rank in range(size)).backward()
    for found, expected in zip(run(size, gradient), everything, strict=True):
        np.testing.assert_allclose(found, expected.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce(op: Any, size: int) -> None:
    def total(everything: Any) -> Any:
        return sum(everything) / (size if op == "mean" else 1)

    assert_gradients(
        size,
        lambda collectives, mine: (
            (collectives.rank + 1) * functions.all_reduce(collectives, mine, op) ** 3
        ).sum(),
        lambda rank, everything: ((rank + 1) * total(everything) ** 3).sum(),
    )


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_of_different_shapes(size: int) -> None:
    def in_replica(collectives: Collectives, mine: Any) -> Any:
        everyone = functions.all_gather(collectives, {"x": mine, "rank": collectives.rank})
        assert [each["rank"] for each in everyone] == list(range(size))
        scale = collectives.rank + 1
        return sum(scale * (each["x"] ** (each["rank"] + 2)).sum() for each in everyone)

    assert_gradients(
        size,
        in_replica,
        lambda rank, everything: sum(
            (rank + 1) * (each ** (other + 2)).sum() for other, each in enumerate(everything)
        ),
        rows=lambda rank: rank + 1,
    )


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast(source: int) -> None:
    assert_gradients(
        3,
        lambda collectives, mine: (
            mine * functions.broadcast(collectives, mine, source) ** (collectives.rank + 1)
        ).sum(),
        lambda rank, everything: (everything[rank] * everything[source] ** (rank + 1)).sum(),
    )


def test_a_gradient_of_a_gradient() -> None:
    def in_replica(collectives: Collectives, mine: Any) -> Any:
        loss = (functions.all_reduce(collectives, mine) ** 3).sum()
        (gradient,) = torch.autograd.grad(loss, mine, create_graph=True)
        return (gradient**2).sum()

    def of_all(rank: int, everything: Any) -> Any:
        loss = 2 * (sum(everything) ** 3).sum()
        (gradient,) = torch.autograd.grad(loss, everything[rank], create_graph=True)
        return (gradient**2).sum()

    assert_gradients(2, in_replica, of_all)


def test_nested_values_of_which_some_need_no_gradient() -> None:
    def in_replica(collectives: Collectives) -> Any:
        mine = values(0)
        nest = {"a": (mine, 3), "b": [torch.ones(2), torch.tensor([2]), np.ones(1)]}
        assert functions.needs_gradient(nest)
        assert not functions.needs_gradient(nest["b"])
        with torch.no_grad():
            assert not functions.needs_gradient(nest)
        found = functions.all_reduce(collectives, nest)
        assert found["a"][1] == 6
        assert [each.tolist() for each in found["b"]] == [[2.0, 2.0], [4], [2.0]]
        (found["a"][0].sum() + found["b"][0].sum()).backward()
        return mine.grad[0, 0].item()

    assert run_replicas(2, in_replica) == [2.0, 2.0]


def test_there_is_no_gradient_of_a_maximum() -> None:
    with pytest.raises(ValueError, match=r"no gradient of all_reduce\('max'\)"):
        functions.all_reduce(Collectives(Carrier()), values(0), "max")


def batch_norm(inputs: Any, rows: int, total: Any) -> Any:
    """Returns inputs, normalised by the mean and variance of `rows` rows, by sums over replicas."""
    mean = total(inputs.sum(0)) / rows
    variance = total(((inputs - mean) ** 2).sum(0)) / rows
    return (inputs - mean) / (variance + 1e-5).sqrt()


@pytest.mark.parametrize("size", [2, 4])
def test_batch_norm_by_all_sum_is_that_of_the_whole_batch(size: int) -> None:
    data = torch.from_numpy(np.random.default_rng(0).standard_normal((12, 6)))
    targets = torch.from_numpy(np.random.default_rng(1).standard_normal((12, 6)))

    def layers() -> Any:
        rng = np.random.default_rng(2)
        return [torch.nn.Parameter(torch.from_numpy(rng.standard_normal((6, 6)))) for _ in "123"]

    def outputs_of(parameters: Any, inputs: Any, total: Any) -> Any:
        for parameter in parameters:
            inputs = batch_norm((inputs @ parameter).tanh(), 12, total)
        return inputs

    def in_replica(collectives: Collectives) -> Any:
        mine = slice(*(12 * part // size for part in (collectives.rank, collectives.rank + 1)))
        inputs = data[mine].clone().requires_grad_()
        parameters = layers()
        wrap(torch.optim.SGD(parameters, lr=1.0), collectives, bucket_bytes=64)
        outputs = outputs_of(
            parameters, inputs, lambda part: functions.all_reduce(collectives, part)
        )
        ((outputs - targets[mine]) ** 2).mean().backward()
        # The loss is the mean over replicas.
        return outputs.detach(), inputs.grad / size, [each.grad for each in parameters]

    inputs = data.clone().requires_grad_()
    parameters = layers()
    whole = inputs
    for parameter in parameters:
        hidden = (whole @ parameter).tanh()
        whole = torch.nn.functional.batch_norm(hidden, None, None, training=True)
    ((whole - targets) ** 2).mean().backward()
    found = run_replicas(size, in_replica)
    for index, expected in enumerate([whole.detach(), inputs.grad]):
        together = torch.cat([each[index] for each in found])
        np.testing.assert_allclose(together, expected, rtol=1e-9, atol=1e-12)
    for _, _, gradients in found:
        for mine, parameter in zip(gradients, parameters, strict=True):
            np.testing.assert_allclose(mine, parameter.grad, rtol=1e-9, atol=1e-12)


def test_tensors_are_gathered_as_they_were() -> None:
    given = {
        "view": torch.arange(6.0).reshape(2, 3).T,
        "gradient": torch.ones(2, requires_grad=True) * 2,
        "large": torch.arange(9999),
        "bfloat16": torch.ones(2, dtype=torch.bfloat16),
        "conjugate": torch.tensor([1j]).conj(),
        "sparse": torch.ones(2).to_sparse(),
        "parameter": torch.nn.Parameter(torch.zeros(())),
        "empty": torch.ones(0, 2),
    }
    with courier_carriers(one_machine)(2) as carriers:
        results = run_all(
            carriers, lambda each: each.all_gather(given, CollectiveCall(0, "all_gather"))
        )
    for gathered in itertools.chain(*results):
        for name, tensor in given.items():
            found = gathered[name]
            assert type(found) is type(tensor)
            assert found.requires_grad == tensor.requires_grad
            torch.testing.assert_close(found, tensor)


def test_small_tensors_travel_inside_of_one_pickle() -> None:
    payload = _payload.pack([torch.zeros(100_000)[:3] for _ in range(60)])
    assert [len(part) < 6000 for part in payload] == [True]
