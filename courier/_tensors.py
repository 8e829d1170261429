"""Tensors of PyTorch and arrays of JAX on their way: their memory, as that of arrays of numpy.

They themselves copy it into the pickle, PyTorch four times. What is more than numbers (sparse, quantized,
of a subclass, with attributes or hooks) is left to them.
"""

import copyreg
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from courier._modules import loaded_module

_reducers: dict[type, Callable[[Any], Any]] = {}


def tensor_reducers() -> Mapping[type, Callable[[Any], Any]]:
    """Returns what pickles them, by type; empty where nobody has imported PyTorch or JAX."""
    if ("torch" in sys.modules or "jax" in sys.modules) and len(_reducers) < 3:
        if (torch := loaded_module("torch")) is not None and loaded_module("numpy") is not None:
            _reducers.update({torch.Tensor: _reduced, torch.nn.Parameter: _reduced})
        if (jax := loaded_module("jax._src.array")) is not None:
            _reducers[jax.ArrayImpl] = _reduced_of_jax
    return _reducers


class TensorPickler(pickle.Pickler):
    """Pickles them, too. `dispatch_table` is that of `copyreg`, with what `tensor_reducers` returned."""

    dispatch_table: dict[type, Callable[[Any], Any]] = {}
    sizes = 0, 0


def tensor_pickler() -> type[TensorPickler] | None:
    """Returns it; None where there are no tensors."""
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
        or 0 in tensor.stride()  # it repeats what it has
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
    else:  # tensors may always be written
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
    # Pickle does not know what bfloat16 and float8 have for memory.
    return _array_of_jax, (
        values if dtype.isbuiltin == 1 else values.view(f"u{dtype.itemsize}"),
        dtype,
    )


def _array_of_jax(values: Any, dtype: Any) -> Any:
    import jax

    return jax.device_put(values.view(dtype))
