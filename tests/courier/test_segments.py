import concurrent.futures
import gc
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import courier
from tests.courier import served
from tests.courier.conftest import Serve
from tests.courier.waiting import wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")

_PATIENCE_S = 20.0
_PAGE = 4096
#: Smaller buffers go inline.
_MIN_BYTES = 1 << 18


class Node(served.Node):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept)

    def make(self, size: int, seed: int) -> Any:
        return _random(size, seed)

    def stream(self, count: int, size: int) -> Iterator[Any]:
        for index in range(count):
            yield np.full(size, index, np.uint8)


def _maps(name: str = "memfd:courier (deleted)") -> int:
    """Returns how many mappings of segments this process has, on both sides of its calls."""
    return Path("/proc/self/maps").read_text().count(name)


def _segments() -> set[str]:
    """Returns the numbers of their inodes, which are not used again."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:courier (deleted)" in line}


def _spoil(array: Any) -> None:
    array[:] = 0


def _random(size: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def client(serve: Serve, node: Node) -> Any:
    return serve(node, client={"call_timeout": 60})[1]


@pytest.mark.parametrize(
    "size",
    [0, 1, _MIN_BYTES - 1, _MIN_BYTES, _MIN_BYTES + 63, 2 * _MIN_BYTES - _PAGE + 1, (9 << 20) - 1],
)
def test_an_array_of_any_size_comes_back_as_it_was(client: Any, size: int) -> None:
    array = _random(size, size)
    for _ in range(3):
        result = client.echo(array)
        np.testing.assert_array_equal(result, array)
        assert result.flags.writeable
        result[:] = 0
    np.testing.assert_array_equal(array, _random(size, size))


@pytest.mark.parametrize("mode", ["wire", "copy"])
def test_values_come_back_as_they_were(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    base = np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10)
    structured = np.zeros(1 << 16, [("position", "3f8"), ("name", "S4")])
    structured["position"][:, 1] = np.arange(1 << 16)
    structured["name"] = b"abc"
    frozen = _random(2 * _MIN_BYTES)
    frozen.flags.writeable = False
    cases: dict[str, Any] = {
        "structured": structured,
        "read-only": frozen,
        "fortran": np.asfortranarray(base),
        "strided": base[::2, ::3],
        "reversed": base[::-1],
        "transposed": base[:512].T,
        "a slice": base[3:700],
        "broadcast": np.broadcast_to(base[0], (512, 1 << 10)),
        "without an axis": base[:0],
        "a scalar": np.array(3.5),
        "five axes": base.reshape(4, 256, 2, 8, 64),
    }
    for name in ("?", "u1", "<i2", ">i4", "f8", "c16", "M8[s]", "S7", "U3"):
        kind = np.dtype(name)
        count = 2 * _MIN_BYTES // kind.itemsize + 1
        text = kind.kind in "SU"
        cases[name] = np.full(count, "ab", kind) if text else np.arange(count).astype(kind)
    cases["once more"] = cases["u1"]
    data = frozen.tobytes()
    cases |= {"bytes": data, "bytearray": bytearray(data), "text": "ä" * _MIN_BYTES}
    results = client.echo(cases)
    for name in ("bytes", "bytearray", "text"):
        sent, received = cases.pop(name), results.pop(name)
        assert (type(received), received) == (type(sent), sent)
    for name, array in cases.items():
        assert results[name].dtype == array.dtype
        np.testing.assert_array_equal(results[name], array, err_msg=name)
    assert results["fortran"].flags.f_contiguous
    assert not results["read-only"].flags.writeable
    assert results["once more"] is results["u1"]


def test_segments_are_used_again_when_what_was_received_is_gone(client: Any) -> None:
    array = _random(1 << 20)
    before = _segments()
    client.echo(array)
    assert _segments() - before  # large buffers pass no socket
    peak = 0
    for index in range(200):
        array[:8] = index
        result = client.echo(array)
        assert int(result[0]) == index
        peak = max(peak, _maps())
    assert peak <= 16


def test_a_slice_keeps_its_memory_and_gives_it_back_when_it_goes(client: Any) -> None:
    client.echo(_random(1 << 20))
    expected = _random(1 << 20, 7)
    part = client.make(1 << 20, 7)[1000:2000]
    for seed in range(20):
        client.make(1 << 20, 100 + seed)
    np.testing.assert_array_equal(part, expected[1000:2000])
    held = _maps()
    del part
    parts = [client.make(1 << 20, 7)]
    assert _maps() <= held
    np.testing.assert_array_equal(parts[0], expected)


@pytest.mark.parametrize("who", ["client", "server"])
def test_a_receiver_that_keeps_everything_gets_the_rest_inline(
    client: Any, node: Node, who: str
) -> None:
    count, size = 40, _MIN_BYTES
    kept: list[Any] = []
    for seed in range(count):
        if who == "server":
            client.keep(_random(size, seed))
        else:
            kept.append(client.make(size, seed))
    kept = kept or node.kept
    assert len(kept) == count
    for seed, array in enumerate(kept):
        np.testing.assert_array_equal(array, _random(size, seed))
        array[:] = seed
    for seed, array in enumerate(kept):
        assert (array == seed).all()
    assert _maps() <= 64
    kept.clear()
    before = _maps()
    if who == "server":
        client.keep(_random(size, 5))
    else:
        kept.append(client.make(size, 5))
    np.testing.assert_array_equal(kept[0], _random(size, 5))
    assert _maps() <= before


def test_the_sender_may_use_its_array_again_once_the_answer_has_come(
    client: Any, node: Node
) -> None:
    array = _random(1 << 20)
    client.apply(_spoil, array)  # what the receiver writes does not come back
    np.testing.assert_array_equal(array, _random(1 << 20))
    for index in range(5):
        array[:] = index
        client.keep(array)
        array[:] = 255
    for index, kept in enumerate(node.kept):
        assert (kept == index).all()
        kept[:] = 100
    assert (array == 255).all()


def test_what_was_received_stays_valid_without_its_connection_and_gives_all_memory_back(
    serve: Serve, node: Node
) -> None:
    before = _maps()
    server, client = serve(node)
    for size in (_MIN_BYTES, 1 << 20, 5 << 20):
        client.echo(_random(size))
    result = client.make(1 << 20, 3)
    client.keep(_random(1 << 20, 4))
    courier.close(client)
    server.stop(1.0)
    gc.collect()
    for seed, array in ((3, result), (4, node.kept[0])):
        np.testing.assert_array_equal(array, _random(1 << 20, seed))
        array[:] = 1
        assert (array == 1).all()
    del result, array
    node.kept.clear()
    wait_until(lambda: _maps() <= before)


def test_items_of_a_generator_come_by_segments(client: Any) -> None:
    peak = 0
    for index, item in enumerate(client.stream(60, 1 << 20)):
        assert (item == index).all()
        peak = max(peak, _maps())
    assert peak <= 40
    kept = list(client.stream(60, _MIN_BYTES))
    assert all((item == index).all() for index, item in enumerate(kept))


def test_threads_that_hammer_with_large_arrays_get_what_they_sent(client: Any) -> None:
    def hammer(thread: int) -> None:
        generator = np.random.default_rng(thread)
        kept: list[tuple[Any, int]] = []
        for turn in range(25):
            size = int(generator.integers(_MIN_BYTES // 2, 4 * _MIN_BYTES))
            array = generator.integers(0, 256, size, np.uint8)
            checksum = zlib.crc32(array)
            assert client.apply(zlib.crc32, array) == checksum
            result = client.echo(array)
            assert zlib.crc32(result) == checksum
            kept.append((result, checksum))
            if turn % 5 == 4:
                for earlier, expected in kept:
                    assert zlib.crc32(earlier) == expected
                    earlier[:] = thread
                kept.clear()

    arrays = [_random(_MIN_BYTES + 1000 * seed, seed) for seed in range(60)]
    futures = [client.futures.echo(array) for array in arrays]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(hammer, range(6)))
    for future, array in zip(futures, arrays, strict=True):
        np.testing.assert_array_equal(future.result(_PATIENCE_S), array)


def test_segments_that_nobody_used_for_long_are_given_back(serve: Serve, node: Node) -> None:
    before = _segments()  # those of earlier tests, which may go at any moment
    _, client = serve(node, timing=courier.Timing(tidy_s=0.05, segment_idle_s=0.2))
    result = client.make(1 << 20, 1)
    (inode,) = _segments() - before

    def mappings() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(line.split()[4] == inode for line in lines)

    assert mappings() == 2
    del result
    wait_until(lambda: mappings() <= 1)  # the server's; the client hears of it later
    np.testing.assert_array_equal(client.make(1 << 20, 2), _random(1 << 20, 2))


@pytest.mark.slow
def test_memory_is_given_back_by_any_thread_and_by_the_collector(client: Any) -> None:
    for seed in range(30):
        cycle: list[Any] = [client.make(1 << 20, seed)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        arrays = [client.make(1 << 20, seed)]
        thread = threading.Thread(target=arrays.clear)
        thread.start()
        assert zlib.crc32(client.make(1 << 20, seed)) == zlib.crc32(_random(1 << 20, seed))
        thread.join()
    assert _maps() <= 16


def test_the_receiver_does_not_hold_on_to_segments_that_the_sender_has_dropped(
    serve: Serve, node: Node
) -> None:
    timing = courier.Timing(segment_idle_s=0.0)
    _, client = serve(node, timing=timing, client={"timing": timing})
    for seed in range(50):
        client.echo(_random(_MIN_BYTES, seed))
    assert _maps() <= 32


def test_where_no_segment_can_be_had_buffers_go_inline(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no more descriptors")

    client.echo(1)
    monkeypatch.setattr(os, "memfd_create", refuse)
    array = _random(1 << 20)
    np.testing.assert_array_equal(client.echo(array), array)
