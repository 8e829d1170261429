"""Nested values: taken apart, packed, and put together again."""

import dataclasses
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

from launchpad_lite import replicas
from launchpad_lite.parts import nests
from launchpad_lite.replicas._packing import Packed, combined
from tests.engines import needs_torch
from tests.launchpad_lite.replicas.together import in_memory, returned, together


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Losses:
    actor: Any
    critic: Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """Has a constructor of its own, as models of JAX do."""

    weights: Any
    size: int = dataclasses.field(init=False)

    def __init__(self, size: int) -> None:
        object.__setattr__(self, "weights", np.arange(size))
        object.__setattr__(self, "size", size)


NEST = {
    "loss": Losses(np.float32(1.5), [np.arange(3), np.zeros((2, 0))]),
    "pair": Pair((1, 2.5), OrderedDict(a=True, b=None)),
}


def test_leaves_have_paths() -> None:
    paths = [path for path, _ in nests.leaves(NEST)]
    assert paths == [
        "['loss'].actor",
        "['loss'].critic[0]",
        "['loss'].critic[1]",
        "['pair'].left[0]",
        "['pair'].left[1]",
        "['pair'].right['a']",
    ]


def test_a_nest_comes_back_as_it_was() -> None:
    back = Packed(NEST).unpacked()
    np.testing.assert_equal(dataclasses.asdict(back["loss"]), dataclasses.asdict(NEST["loss"]))
    assert back["pair"] == NEST["pair"]
    assert [type(leaf) for _, leaf in nests.leaves(back)] == [
        type(leaf) for _, leaf in nests.leaves(NEST)
    ]


def test_mappings_stay_of_their_kind() -> None:
    found = Packed([defaultdict(list, a=1), Counter(a=1)]).unpacked()
    assert found == [{"a": 1}, Counter(a=1)]
    assert found[0]["b"] == []


def test_a_dataclass_may_have_a_constructor_of_its_own() -> None:
    layer = Layer(2)
    back = nests.rebuilt(layer, lambda leaf: leaf + 1)
    assert (type(back), back.weights.tolist(), back.size) == (Layer, [1, 2], 3)
    assert (layer.weights.tolist(), layer.size) == ([0, 1], 2)


def test_what_is_packed_is_a_copy() -> None:
    values = np.zeros(3)
    packed = Packed({"a": values})
    packed.arrays["<f8"] += 1
    assert not values.any()


def test_the_mean_of_integers_is_a_float() -> None:
    result = combined([{"a": 1, "b": np.array([1, 2])}, {"a": 2, "b": np.array([2, 2])}], "mean")
    assert result["a"] == 1.5
    np.testing.assert_array_equal(result["b"], [1.5, 2.0])


def test_results_of_other_shapes_cannot_be_combined() -> None:
    with pytest.raises(ValueError, match=r"float64\[1\].*float64\[2\]"):
        combined([np.zeros(1), np.zeros(2)], "sum")


@pytest.mark.parametrize(
    "value",
    ["text", object(), np.array(["text"]), np.ma.masked_array([1.0], [True])],
    ids=lambda value: type(value).__name__,
)
def test_a_leaf_that_cannot_be_added_is_named(value: object) -> None:
    with pytest.raises(
        TypeError, match=rf"\['a'\]\[1\] is {type(value).__name__}.*: replicas combine numbers"
    ):
        Packed({"a": [1, value]})


@pytest.mark.parametrize("op", ["sum", "product"])
@pytest.mark.parametrize(
    "number", [2**62, -(2**62) - 1, np.int64(2**62), np.full(2, 2**30, np.int32), np.uint8(128)]
)
def test_integers_are_combined_exactly_or_not_at_all(number: Any, op: Any) -> None:
    def exact(repl: replicas.Replicator) -> Any:
        mine = {"a": number // 2 if op == "sum" else number, "b": -5}
        if op == "product" and repl.replica_id:
            mine["a"] = mine["a"] // mine["a"]  # ones
        return repl.all_reduce(mine, op)

    def too_large(repl: replicas.Replicator) -> list[str]:
        texts = []
        for call in (
            lambda: repl.all_reduce({"b": 1, "a": number}, op),
            lambda: repl.map_reduce(lambda _: {"b": 1, "a": number}, range(2), op),
        ):
            with pytest.raises(OverflowError, match=rf"\['a'\]: the {op} over .* too") as error:
                call()
            texts.append(str(error.value))
        return texts

    mine = number // 2 if op == "sum" else number  # before numpy 2, of another type
    expected = 2 * mine if op == "sum" else mine
    for result in returned(together(in_memory(2), exact)):
        assert np.array_equal(result["a"], expected)
        assert type(result["a"]) is type(mine)
        assert result["b"] == (-10 if op == "sum" else 25)
    first, other = returned(together(in_memory(2), too_large))
    assert first == other


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@needs_torch
def test_means_of_small_floats_are_computed_with_more_bits(dtype: str) -> None:
    import torch

    large = 40_000.0 if dtype == "float16" else 256.0

    def story(repl: replicas.Replicator) -> Any:
        tensor = repl.all_reduce(torch.full((2,), large).to(getattr(torch, dtype)), "mean")
        array = repl.all_reduce(np.full(2, 40_000, np.float16), "mean")
        assert (tensor.dtype, array.dtype) == (getattr(torch, dtype), np.float16)
        return tensor.float().tolist(), array.tolist()

    assert returned(together(in_memory(2), story)) == [([large] * 2, [40_000.0] * 2)] * 2


@needs_torch
def test_tensors_keep_their_layout_or_are_refused() -> None:
    import torch

    images = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    back = Packed(images.requires_grad_()).unpacked()
    assert back.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back, images)
    with pytest.raises(TypeError, match=r"\['a'\] is Tensor of torch.float32, torch.sparse_coo: "):
        Packed({"a": torch.eye(2).to_sparse()})
