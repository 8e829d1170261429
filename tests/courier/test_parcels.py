import collections
import linecache
import pickle
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import courier
from courier.errors import ProtocolError
from courier.values.parcel import MOST_BUFFERS, ParcelAssembler, dumps, pack, unpack
from courier.wire.secret import SequenceWindow, SessionKey

#: A busy machine takes its time.
_PATIENTLY = settings(suppress_health_check=[HealthCheck.too_slow])
_BUFFERS = st.lists(st.binary(max_size=300), max_size=12)


@given(st.lists(st.lists(st.integers(0, 255)), max_size=8), st.integers(1, 64), st.data())
@_PATIENTLY
def test_arrays_come_out_of_their_pieces_however_these_are_cut(
    rows: list[list[int]], size: int, draw: st.DataObject
) -> None:
    parcel = pack([np.array(row, np.uint8) for row in rows])
    pieces = list(parcel.pieces(size))
    assert all(0 < len(piece) <= size for piece in pieces)
    stream = b"".join(pieces)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    assembler = ParcelAssembler(len(parcel.pickle), [len(buffer) for buffer in parcel.buffers])
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        assembler.add(stream[start:end])
    received = unpack(assembler.finish())
    assert [array.tolist() for array in received] == rows
    assert all(array.flags.writeable for array in received)


@given(st.binary(min_size=1, max_size=100), _BUFFERS, st.integers(1, 50))
@_PATIENTLY
def test_missing_or_excess_bytes_are_found(data: bytes, buffers: list[bytes], cut: int) -> None:
    stream = data + b"".join(buffers)
    sizes = [len(buffer) for buffer in buffers]
    short = ParcelAssembler(len(data), sizes)
    short.add(stream[:-cut])
    with pytest.raises(ProtocolError, match="fewer"):
        short.finish()
    long = ParcelAssembler(len(data), sizes)
    with pytest.raises(ProtocolError, match="more"):
        long.add(stream + bytes(cut))


@given(st.lists(st.integers(-3, 40) | st.integers(0, 1 << 64)))
@_PATIENTLY
def test_a_sequence_number_is_admitted_at_most_once(numbers: list[int]) -> None:
    window = SequenceWindow()
    admitted = collections.Counter(number for number in numbers if window.admit(number))
    assert all(count == 1 for count in admitted.values())
    # In a window that has not moved, each positive number is admitted exactly once.
    assert set(admitted) == {number for number in numbers if number > 0}


def test_a_window_that_moves_on_never_admits_a_number_twice() -> None:
    window = SequenceWindow()
    numbers = [*range(2, 70_000), 1, *range(70_000, 70_100)]
    admitted = [number for number in numbers if window.admit(number)]
    assert len(admitted) == len(set(admitted)) >= 70_000 - 2
    assert not any(window.admit(number) for number in numbers)


@given(st.binary(max_size=50), st.binary(max_size=50))
@_PATIENTLY
def test_a_seal_holds_for_its_head_direction_and_key_only(head: bytes, other: bytes) -> None:
    secret = courier.Secret.generate()
    key = SessionKey(secret, b"c" * 16, b"s" * 32)
    assert SessionKey(secret, b"c" * 16, b"s" * 32).seal_request(head) == key.seal_request(head)
    assert (key.seal_request(other) == key.seal_request(head)) == (head == other)
    assert key.seal_reply(head) != key.seal_request(head)
    for stranger in (
        SessionKey(None, b"c" * 16, b"s" * 32),
        SessionKey(courier.Secret.generate(), b"c" * 16, b"s" * 32),
        SessionKey(secret, b"d" * 16, b"s" * 32),
        SessionKey(secret, b"c" * 16, b"t" * 32),
    ):
        assert stranger.seal_request(head) != key.seal_request(head)
        assert stranger.prove() != key.prove()


def test_a_secret_shows_and_pickles_only_its_name() -> None:
    secret = courier.Secret.generate()
    key = secret.reveal()
    assert key.hex() not in repr(secret) + secret.name
    assert key not in pickle.dumps(secret)
    assert pickle.loads(pickle.dumps(secret)) == secret
    assert courier.Secret(key) == secret
    assert hash(courier.Secret(key)) == hash(secret)
    data = pickle.dumps(courier.Secret.generate())
    with pytest.raises(courier.AuthenticationError, match="one program"):
        pickle.loads(data)
    with pytest.raises(ValueError, match="16 bytes"):
        courier.Secret(b"short")


def test_a_view_in_any_order_may_be_sent() -> None:
    for order in ("C", "F"):
        array = np.arange(40_000.0).reshape(200, 200).copy(order=order)
        (received,) = unpack(pack([pickle.PickleBuffer(memoryview(array))]))
        assert bytes(received) == array.tobytes(order="A")


def test_a_pickle_leaves_large_arrays_to_its_caller() -> None:
    large, small = np.zeros(1 << 16, np.uint8), np.ones(3)
    for value in ((large, small), (large, small, lambda: 0)):  # the latter needs cloudpickle
        buffers: list[Any] = []
        data = dumps(value, buffers=buffers)
        large[0] += 1
        first, second, *_ = pickle.loads(data, buffers=buffers)
        assert (first[0], second[0]) == (large[0], 1)
        assert len(data) < large.nbytes


def test_very_many_buffers_travel_inside_of_the_pickle() -> None:
    array = np.arange(1 << 15, dtype=np.uint8)
    parcel = pack([array[:] for _ in range(MOST_BUFFERS + 2)])
    assert len(parcel.buffers) == MOST_BUFFERS
    assert all(np.array_equal(each, array) for each in unpack(parcel)[-3:])


def test_what_is_packed_views_the_memory_itself() -> None:
    """Python before 3.11.8 crashes when it collects a view of a view in a loop."""
    (buffer,) = pack(courier.Shared(np.zeros(1 << 17))).buffers
    assert type(memoryview(buffer).obj) is not memoryview


_SCRIPT = """
def one():
    raise ValueError("1")


def two():
    return one() + (  # more
        2
    )
"""


def test_tracebacks_show_lines_of_functions_whose_file_is_not_there(tmp_path: Path) -> None:
    script, names = tmp_path / "script.py", {"__name__": "__main__"}
    script.write_text(_SCRIPT)
    exec(compile(_SCRIPT, script, "exec"), names)
    data = dumps(names["two"])
    script.unlink()
    linecache.clearcache()
    two = pickle.loads(data)
    with pytest.raises(ValueError, match="1") as raised:
        two()
    told = "".join(traceback.format_exception(raised.value))
    assert f'File "{script}", line 7, in two\n    return one() + (  # more\n' in told
    assert f'File "{script}", line 3, in one\n    raise ValueError("1")\n' in told


def test_a_function_arrives_also_if_its_file_cannot_be_looked_for() -> None:
    file, names = "a" * 300, {"__name__": "__main__"}  # as a folder of others: an OSError
    exec(compile(_SCRIPT, file, "exec"), names)
    linecache.cache[file] = len(_SCRIPT), None, _SCRIPT.splitlines(keepends=True), file
    two = pickle.loads(dumps(names["two"]))
    assert two.__code__.co_filename == file


def test_what_the_script_defines_may_be_the_newest_for_who_reads_it(monkeypatch):
    def script(code: str) -> dict[str, Any]:
        main = types.ModuleType("__main__")
        exec(code, vars(main))
        monkeypatch.setitem(sys.modules, "__main__", main)
        return vars(main)

    old = script("def f(): return 1\nclass A:\n  def g(self): return 1\ndef gone(): return 1\n")
    kept = dumps((old["f"], old["A"](), old["gone"]), newest=True)
    script("def f(): return 2\nclass A:\n  def g(self): return 2\n")
    function, instance, gone = pickle.loads(kept)
    assert (function(), instance.g(), gone()) == (2, 2, 1)
