"""Tensors of PyTorch and arrays of JAX travel as arrays of numpy do: their memory beside the pickle."""

import pickle
import warnings
from typing import Any

import numpy as np
import pytest

import courier
from courier.values.parcel import Parcel, pack, unpack, unshared
from launchpad_lite.replicas._devices import ask_jax_for
from tests.courier.conftest import Serve
from tests.engines import needs_jax, needs_torch

pytestmark = pytest.mark.slow
LARGE = 1 << 16


class Echo:
    def echo(self, value: Any) -> Any:
        return value


def arrived(value: Any) -> tuple[Any, Parcel]:
    parcel = pack(value)
    return unpack(unshared(parcel)), parcel


def tensors() -> dict[str, Any]:
    import torch

    large = torch.arange(float(LARGE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        nested = torch.nested.nested_tensor([large, large[:3]])
    return {
        "plain": large,
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "bfloat16": large.to(torch.bfloat16),
        "bool": large > 3,
        "complex": torch.complex(large, -large),
        "conjugate": torch.complex(large, -large).conj(),
        "transposed": large.view(256, 256).t(),
        "channels_last": large.view(16, 16, 16, 16).to(memory_format=torch.channels_last),
        "part": large[10:1000:2],
        "repeated": large[:1].expand(1 << 20, 1 << 20),
        "nested": nested,
        "needs gradient": large.clone().requires_grad_(),
        "computed": large.clone().requires_grad_() * 2,
        "parameter": torch.nn.Parameter(large, requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "subclass": torch.nn.Buffer(large) if hasattr(torch.nn, "Buffer") else large,
    }


@needs_torch
def test_a_tensor_arrives_as_it_was() -> None:
    import torch

    for name, tensor in tensors().items():
        found, _ = arrived(tensor)
        known = pickle.loads(pickle.dumps(tensor))  # as PyTorch has it
        assert (type(found), found.dtype) == (type(known), known.dtype), name
        assert (found.requires_grad, found.layout) == (known.requires_grad, known.layout), name
        if name == "nested":
            assert all(map(torch.equal, found.unbind(), tensor.unbind()))
            continue
        assert found.shape == known.shape, name
        if name == "repeated":
            assert found.stride() == (0, 0)
            continue
        assert torch.equal(found.to_dense(), tensor.detach().to_dense()), name
        if name in ("transposed", "channels_last"):
            assert found.stride() == tensor.stride(), name


@needs_torch
def test_the_memory_of_a_tensor_is_not_in_the_pickle_and_may_be_written() -> None:
    import torch

    for name in ("plain", "bfloat16", "transposed", "parameter"):
        found, parcel = arrived(tensors()[name])
        assert sum(map(len, parcel.buffers)) == LARGE * found.element_size(), name
        assert len(parcel.pickle) < 400, name
        with torch.no_grad():
            found += 1
        beside = pack((tensors()[name], lambda: 0))  # which plain pickle cannot take
        assert sum(map(len, beside.buffers)) == LARGE * found.element_size(), name


@needs_torch
def test_a_model_and_its_optimizer_arrive(serve: Serve) -> None:
    import torch

    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    _, client = serve(Echo())
    found, state = client.echo((model, optimizer.state_dict()))
    assert torch.equal(found.weight, model.weight)
    assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    first, second, _ = client.echo((model.weight, model.weight, lambda: 0))
    assert first is second


@needs_torch
def test_tensors_of_shared_memory_are_copies_that_may_be_written(serve: Serve) -> None:
    import torch

    shared = courier.Shared({"weights": torch.ones(LARGE)})
    _, client = serve(Echo())
    found = client.echo(shared)
    found["weights"] += 1
    assert client.echo(shared)["weights"].sum() == LARGE


@needs_jax
def test_an_array_of_jax_arrives_as_it_was() -> None:
    import jax
    import jax.numpy as jnp

    ask_jax_for(8)  # as tests of replicas need them: JAX listens before its first use only
    for array in (
        jnp.arange(float(LARGE)),
        jnp.ones(LARGE, jnp.bfloat16),
        jnp.float32(3),
        jnp.asarray(2.0),  # of a weak type
        jnp.zeros((0, 3)),
        jnp.ones((300, 200)).T,
        jax.random.key(1),
    ):
        found, parcel = arrived(array)
        assert (type(found), found.dtype, found.shape) == (type(array), array.dtype, array.shape)
        assert getattr(found, "weak_type", None) == getattr(array, "weak_type", None)
        assert (found == array).all()
        if array.size > LARGE // 2:
            assert [len(each) for each in parcel.buffers] == [array.nbytes]
    assert isinstance(arrived([jnp.ones(3), np.ones(3)])[0][1], np.ndarray)
