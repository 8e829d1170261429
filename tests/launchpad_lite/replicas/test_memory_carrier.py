"""Collectives between threads of one process, and of several."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from launchpad_lite import replicas
from tests.launchpad_lite.replicas.together import in_memory, returned, together

#: How many replicas, in how many processes.
groups = st.sampled_from([(2, 1), (3, 1), (8, 1), (4, 2), (6, 3)])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DEFINITIONS = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


@settings(deadline=None, max_examples=40)
@given(groups, st.sampled_from(sorted(DEFINITIONS)), shapes, st.integers(0, 99))
def test_all_reduce_is_what_numpy_says(
    group: tuple[int, int], op: Any, shape: tuple[int, ...], seed: int
) -> None:
    given = [np.random.default_rng([seed, rank]).normal(size=shape) for rank in range(group[0])]
    counts = [np.full(shape, rank + 1) for rank in range(group[0])]

    def story(repl: replicas.Replicator) -> Any:
        mine = {"values": given[repl.replica_id], "counts": [counts[repl.replica_id], 2]}
        return repl.all_reduce(mine, op)

    results = returned(together(in_memory(*group), story))
    for result in results:
        np.testing.assert_allclose(
            result["values"], DEFINITIONS[op](np.array(given), axis=0), rtol=1e-12
        )
        np.testing.assert_array_equal(
            result["counts"][0], DEFINITIONS[op](np.array(counts), axis=0)
        )
        assert result["counts"][1] == DEFINITIONS[op]([2] * group[0])
        np.testing.assert_array_equal(result["values"], results[0]["values"])  # bit by bit


@settings(deadline=None, max_examples=30)
@given(groups, st.data())
def test_broadcast_and_all_gather_give_what_others_have(
    group: tuple[int, int], data: st.DataObject
) -> None:
    size = group[0]
    source = data.draw(st.integers(0, size - 1))
    ragged = data.draw(st.lists(st.lists(st.integers(), max_size=4), min_size=size, max_size=size))

    def story(repl: replicas.Replicator) -> Any:
        rank = repl.replica_id
        sent = repl.broadcast({"a": np.full(3, rank), "b": rank * 1.5}, source)
        return sent, repl.all_gather({"ragged": ragged[rank], "array": np.ones(rank)})

    for sent, gathered in returned(together(in_memory(*group), story)):
        np.testing.assert_array_equal(sent["a"], np.full(3, source))
        assert sent["b"] == source * 1.5
        assert [each["ragged"] for each in gathered] == ragged
        assert [len(each["array"]) for each in gathered] == list(range(size))


@pytest.mark.parametrize("processes", [1, 2])
def test_replicas_that_call_something_else_are_named_in_all(processes: int) -> None:
    def story(repl: replicas.Replicator) -> Any:
        repl.all_sum(1.0)
        if repl.replica_id == 1:
            return repl.all_gather(1, "the odd one")
        return repl.all_sum({"loss": np.zeros(3)})

    outcomes = together(in_memory(4, processes), story)
    texts = [str(each) for each in outcomes if isinstance(each, replicas.CollectiveMismatchError)]
    assert texts
    assert all("replica 1 calls something else" in text for text in texts)
    assert all("all_gather of the odd one, its call 2, at " in text for text in texts)
    assert all("test_memory_carrier.py:" in text for text in texts)
    assert all(isinstance(each, replicas.ReplicaError) for each in outcomes)
