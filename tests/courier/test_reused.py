import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from courier.values.parcel import allocate
from tests.courier.conftest import Serve, go_by


class Node:
    def echo(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> None:
        self.kept = [value]


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def client(node: Node, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a server to which arrays travel over a socket."""
    return serve(node, **go_by("tcp", monkeypatch))[1]


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_PARTS: list[Callable[[Any], Any]] = [
    lambda array: array,
    lambda array: array[-3:],
    lambda array: array.reshape(1, -1).T[1:, :],
    lambda array: memoryview(array)[1:2],
]


@given(
    st.lists(
        st.tuples(st.integers(1 << 15, 1 << 18), st.sampled_from(_PARTS), st.booleans()),
        min_size=2,
        max_size=12,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_kept_of_received_arrays_never_changes(
    client: Any, arrays: list[tuple[int, Callable[[Any], Any], bool]]
) -> None:
    kept: list[tuple[Any, Any]] = []
    for value, (size, part_of, is_kept) in enumerate(arrays, 1):
        sent = np.full(size, value, np.uint32)
        received = client.echo(sent)
        assert np.array_equal(received, sent)
        if is_kept:
            kept.append((part_of(received), part_of(sent)))
        else:
            received[:] = 0  # it is the caller's own
    assert all(np.array_equal(part, wanted) for part, wanted in kept)


def test_memory_is_used_again_only_when_no_view_of_it_is_left(client: Any) -> None:
    sent = np.ones(1 << 20)

    def addresses() -> set[int]:
        return {_address(array) for array in [client.echo(sent) for _ in range(8)]}

    view = client.echo(sent)[5:6]
    before, after = addresses(), addresses()
    assert before & after
    assert _address(view) - 5 * 8 not in before | after


def test_what_the_collector_destroys_finds_its_bytes_to_the_end(client: Any, node: Node) -> None:
    size, seen = 300_000, list[int]()

    class Holder:
        def __init__(self, view: memoryview) -> None:
            self.view, self.itself = view, self

        def __del__(self) -> None:
            memory = allocate(size)
            memory[:] = bytes(size)
            seen.append(self.view[0])

    client.keep(pickle.PickleBuffer(bytearray(b"a") * size))
    Holder(node.kept.pop())
    gc.collect()
    assert seen == [ord("a")]


def test_a_received_view_is_of_the_message_alone(client: Any, node: Node) -> None:
    client.keep(pickle.PickleBuffer(bytearray(300_000)))
    assert len(memoryview(node.kept[0].obj)) == 300_000
