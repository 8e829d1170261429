"""Tensors of PyTorch and arrays of JAX on their way: their memory, as that of arrays of numpy.

They themselves copy it into the pickle, PyTorch four times. What is more than numbers (sparse, quantized,
of a subclass, with attributes or hooks) is left to them.
"""

import copyreg
import pickle
import sys
from collections.abc import Callable
from typing import Any

from courier._modules import loaded_module


class TensorPickler(pickle.Pickler):
    """Pickles tensors, too."""

    #: With what `copyreg` has.
    dispatch_table: dict[type, Callable[[Any], Any]] = {}


def tensor_pickler() -> type[TensorPickler] | None:
    """Returns it, or None where nobody has imported PyTorch or JAX."""
    if "torch" not in sys.modules and "jax" not in sys.modules:
        return None
    torch, jax = loaded_module("torch"), loaded_module("jax._src.array")
    table = TensorPickler.dispatch_table
    if len(table) != len(copyreg.dispatch_table) + 2 * bool(torch) + bool(jax):
        table |= copyreg.dispatch_table
        if torch:
            table |= {torch.Tensor: _reduced, torch.nn.Parameter: _reduced}
        if jax:
            table[jax.ArrayImpl] = _reduced_of_jax
    return TensorPickler


def _reduced(tensor: Any) -> Any:
    import torch

    if (
        tensor.layout is not torch.strided
        or tensor.device.type not in ("cpu", "cuda")
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.__dict__
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
    import numpy as np
    import torch

    array = np.frombuffer(memory, np.uint8)
    # Tensors may always be written, and want their numbers at even addresses.
    if not array.flags.writeable or array.ctypes.data % dtype.itemsize:
        array = array.copy()
    flat = torch.from_numpy(array).view(dtype).to(device)
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
