"""Values as bytes: a pickle, and the buffers of large arrays beside it."""

import io
import pickle
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launchpad_lite.launching import loaded_module

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_COUNT = struct.Struct("<q")
#: Arrays begin at multiples of it, as numpy has them.
_ALIGNMENT = 64
#: Smaller buffers are copied into the pickle: that is cheaper than to have them beside it.
_INSIDE_BYTES = 1 << 12

#: The pickle, then the buffers: all as uint8.
Payload = Sequence[Any]


def pack(value: Any) -> "list[Array]":
    """Returns a value as a payload that lies in the memory of its arrays."""
    import numpy as np

    parts: list[Any] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _INSIDE_BYTES:
            parts.append(raw)
        return raw.nbytes < _INSIDE_BYTES

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=stays_inside).dump(value)
    return [np.frombuffer(part, np.uint8) for part in (file.getbuffer(), *parts)]


class _Pickler(pickle.Pickler):
    """Has tensors travel as buffers: PyTorch takes 0.1 ms for each, and its whole storage."""

    def reducer_override(self, value: Any) -> Any:
        torch = loaded_module("torch")
        if torch is None or type(value) is not torch.Tensor or vars(value) or value.is_quantized:
            return NotImplemented
        try:  # as bytes, because numpy does not have all dtypes
            data = value.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)
        except RuntimeError:  # sparse, say
            return NotImplemented
        facts = value.dtype, value.shape, value.device.type, value.requires_grad
        return _tensor, (data.numpy(), *facts)


def _tensor(data: Any, dtype: Any, shape: Any, device: str, requires_grad: bool) -> Any:
    import torch

    tensor = torch.from_numpy(data).view(dtype).reshape(shape)
    return tensor.to(device).requires_grad_(requires_grad)


def unpack(payload: Payload) -> Any:
    """Returns the value; its arrays lie in the memory of the payload."""
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
    """Returns the payload in memory that `write` has filled; it lies there."""
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
