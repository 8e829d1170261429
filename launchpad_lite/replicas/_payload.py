"""Values as bytes: a pickle, and the buffers of large arrays beside it."""

import pickle
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import courier

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_COUNT = struct.Struct("<q")
#: Arrays begin at multiples of it, as numpy has them.
_ALIGNMENT = 64
#: The pickle, then the buffers: all as uint8.
Payload = Sequence[Any]


def pack(value: Any) -> "list[Array]":
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
    """Returns how many bytes `write` needs."""
    return _begin(len(payload)) + sum(_aligned(len(part)) for part in payload)


def write(payload: Payload, memory: "Array") -> None:
    """Writes a payload into memory."""
    head = b"".join(map(_COUNT.pack, [len(payload), *map(len, payload)]))
    memory[: len(head)] = memoryview(head)
    at = _begin(len(payload))
    for part in payload:
        memory[at : at + len(part)] = part
        at += _aligned(len(part))


def read(memory: "Array") -> "list[Array]":
    """Returns the payload that `write` has put into memory, without a copy."""
    (count,) = _COUNT.unpack(memory[: _COUNT.size].tobytes())
    sizes = [
        size
        for (size,) in _COUNT.iter_unpack(memory[_COUNT.size : (1 + count) * _COUNT.size].tobytes())
    ]
    parts, at = [], _begin(count)
    for size in sizes:
        parts.append(memory[at : at + size])
        at += _aligned(size)
    return parts


def _begin(count: int) -> int:
    return _aligned((1 + count) * _COUNT.size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
