"""Values as bytes: a pickle, and the buffers of large arrays beside it."""

import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import courier
from launchpad_lite.replicas._carrier import Array

#: Arrays begin at multiples of it, as numpy has them.
_ALIGNMENT = 64
#: The pickle, then the buffers: all as uint8.
Payload = Sequence[Any]


def pack(value: Any) -> list[Array]:
    """Returns a value as a payload that shares the memory of its arrays."""
    import numpy as np

    buffers: list[Any] = []
    data = courier.dumps(value, buffers=buffers)
    return [np.frombuffer(part, np.uint8) for part in (data, *buffers)]


def unpack(payload: Payload) -> Any:
    """Returns the value; its arrays share the memory of the payload."""
    data, *buffers = payload
    return pickle.loads(data, buffers=buffers)


def written_bytes(payload: Payload) -> int:
    return _offsets([len(part) for part in payload])[-1]


def write(payload: Payload, memory: Array) -> None:
    """Writes a payload into memory: the number and sizes of its parts, then these."""
    sizes = [len(part) for part in payload]
    head = struct.pack(f"<{1 + len(sizes)}q", len(sizes), *sizes)
    memory[: len(head)] = memoryview(head)
    for begin, part in zip(_offsets(sizes), payload, strict=False):
        memory[begin : begin + len(part)] = part


def read(memory: Array) -> list[Array]:
    (count,) = struct.unpack("<q", memory[:8].tobytes())
    sizes = struct.unpack(f"<{count}q", memory[8 : 8 * (1 + count)].tobytes())
    return [memory[at : at + size] for at, size in zip(_offsets(sizes), sizes, strict=False)]


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Returns where each part begins, and where the last one ends."""
    lengths = [8 * (1 + len(sizes)), *sizes]
    return list(itertools.accumulate(-(-each // _ALIGNMENT) * _ALIGNMENT for each in lengths))
