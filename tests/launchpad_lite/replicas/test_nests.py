"""Nested values: taken apart, packed, and put together again."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

from launchpad_lite.replicas import _nests
from launchpad_lite.replicas._packing import Packed, combined


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Losses:
    actor: Any
    critic: Any


NEST = {
    "loss": Losses(np.float32(1.5), [np.arange(3), np.zeros((2, 0))]),
    "pair": Pair((1, 2.5), OrderedDict(a=True, b=None)),
}


def test_leaves_have_paths() -> None:
    paths = [path for path, _ in _nests.leaves(NEST)]
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
    assert [type(leaf) for _, leaf in _nests.leaves(back)] == [
        type(leaf) for _, leaf in _nests.leaves(NEST)
    ]


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


@pytest.mark.parametrize("value", ["text", object(), np.array(["text"])])
def test_a_leaf_that_cannot_be_added_is_named(value: object) -> None:
    with pytest.raises(TypeError, match=r"\['a'\]\[1\] is .*: replicas combine numbers"):
        Packed({"a": [1, value]})
