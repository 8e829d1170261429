"""Pickles tensors of PyTorch and arrays of JAX by their memory, as arrays of numpy.

Their own pickling copies it, PyTorch's four times. It stays for tensors that are more than numbers
(sparse, quantized, of a subclass, with attributes or hooks).
"""

import copyreg
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from courier.values.modules import loaded_module

_reducers: dict[type, Callable[[Any], Any]] = {}


def tensor_reducers() -> Mapping[type, Callable[[Any], Any]]:
    """Returns their reducers, by type; empty where neither PyTorch nor JAX is imported."""
    if ("torch" in sys.modules or "jax" in sys.modules) and len(_reducers) < 3:
        if (torch := loaded_module("torch")) is not None and loaded_module("numpy") is not None:
            _reducers.update({torch.Tensor: _reduced, torch.nn.Parameter: _reduced})
        if (jax := loaded_module("jax._src.array")) is not None:
            _reducers[jax.ArrayImpl] = _reduced_of_jax
    return _reducers


class TensorPickler(pickle.Pickler):
    """Pickles them, too. `dispatch_table` is that of `copyreg`, with `tensor_reducers`."""

    dispatch_table: dict[type, Callable[[Any], Any]] = {}
    sizes = 0, 0


def tensor_pickler() -> type[TensorPickler] | None:
    if not (reducers := tensor_reducers()):
        return None
    sizes = len(reducers), len(copyreg.dispatch_table)
    if TensorPickler.sizes != sizes:
        TensorPickler.dispatch_table = {**reducers, **copyreg.dispatch_table}
        TensorPickler.sizes = sizes
    return TensorPickler


def _reduced(tensor: Any) -> Any:
    import torch

    if (
        tensor.layout is not torch.strided
        or tensor.device.type not in ("cpu", "cuda")
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.__dict__
        or 0 in tensor.stride()  # it repeats elements
    ):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    plain = tensor.detach()
    steps = zip(plain.shape, plain.stride(), strict=True)
    # Its elements lie side by side, in whatever order of dimensions.
    if plain.numel() and 1 + sum((length - 1) * step for length, step in steps) != plain.numel():
        plain = plain.contiguous()
    flat = plain.as_strided((plain.numel(),), (1,)).cpu()
    memory = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
    layout = tuple(plain.shape), plain.stride(), tensor.requires_grad
    return _tensor, (type(tensor), memory, tensor.dtype, tensor.device, *layout)


def _tensor(
    kind: type,
    memory: Any,
    dtype: Any,
    device: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
) -> Any:
    import torch

    data = memoryview(memory)
    if not data.nbytes:
        flat = torch.empty(0, dtype=dtype, device=device)
    else:  # tensors are always writable
        flat = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).to(device)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
    tensor = flat.as_strided(shape, strides)
    if kind is torch.Tensor:
        return tensor.requires_grad_(requires_grad)
    return kind(tensor, requires_grad=requires_grad)


def _reduced_of_jax(array: Any) -> Any:
    if array.weak_type:
        return array.__reduce__()
    import numpy as np

    values = np.asarray(array)
    dtype = values.dtype
    # Pickle does not know the memory of bfloat16 and float8.
    return _array_of_jax, (
        values if dtype.isbuiltin == 1 else values.view(f"u{dtype.itemsize}"),
        dtype,
    )


def _array_of_jax(values: Any, dtype: Any) -> Any:
    import jax

    return jax.device_put(values.view(dtype))
