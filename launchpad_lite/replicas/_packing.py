"""Leaves of nested values in flat arrays, one for each dtype, and back.

Values of all packages travel as numpy arrays. Tensors and arrays on a CPU give and take their memory
without another copy; those on a device are copied to the host first.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from launchpad_lite.launching import loaded_module
from launchpad_lite.parts import nests
from launchpad_lite.replicas._carrier import Array, Op
from launchpad_lite.replicas._operations import ArrayOperation

#: Prefix for a second array of integers, which holds them as floats.
_CHECK = "check of "


class Packed:
    """The leaves of a nested value, packed.

    `arrays` has a flat array for each dtype, and a list of the leaves that are not packed. `text`
    has the path, dtype and shape of all leaves, also for comparisons.
    """

    def __init__(self, nest: Any, op: str = "", aside: str = "") -> None:
        """Packs a nested value; leaves of the kind `aside` are not packed.

        Before the operation `mean`, integers become floats. Before sums and products they are also
        kept as floats, to find overflows.
        """
        import numpy as np

        self._nest = nest
        self._op = op
        self._leaves = list(nests.leaves(nest))
        parts: dict[str, list[Any]] = {}
        self._places: list[tuple[str, tuple[int, ...]]] = []
        described = []
        for path, leaf in self._leaves:
            check_not_traced(leaf)
            if aside and nests.kind(leaf) == aside and not _may_wrap(leaf.dtype, op):
                parts.setdefault(aside, []).append(leaf)
                self._places.append((aside, ()))
                what = f"{aside} {leaf.dtype}{list(leaf.shape)}"
            else:
                array = as_numpy(leaf, path)
                if op == "mean" and array.dtype.kind in "iub":
                    array = array.astype(np.float64)
                parts.setdefault(array.dtype.str, []).append(array.reshape(-1))
                self._places.append((array.dtype.str, array.shape))
                what = f"{array.dtype}{list(array.shape)}"
            described.append(f"{path}{' ' if path else ''}{what}")
        self._aside = aside
        self.arrays: dict[str, Any] = {
            name: flat if name == aside else np.concatenate(flat) for name, flat in parts.items()
        }
        for name, array in list(self.arrays.items()):
            if name != aside and _may_wrap(array.dtype, op):
                self.arrays[_CHECK + name] = array.astype(np.float64)
        self.text = _shortened(described)

    def unpacked(self) -> Any:
        """Returns the nested value with what the arrays have now; leaves keep their kinds."""
        offsets = dict.fromkeys(self.arrays, 0)
        found = []
        for (path, leaf), (name, shape) in zip(self._leaves, self._places, strict=True):
            begin = offsets[name]
            offsets[name] = end = begin + math.prod(shape)
            part = self.arrays[name][begin:end]
            # An overflow is off by the whole range, and the float by much less than half of it.
            check = self.arrays.get(_CHECK + name)
            if (
                check is not None
                and (abs(check[begin:end] - part) >= 2.0 ** (8 * part.itemsize - 1)).any()
            ):
                raise OverflowError(
                    f"{path or 'the value'}: the {self._op} over the replicas is too large for "
                    f"{part.dtype}; convert it to a larger type, or to float"
                )
            found.append(part[0] if name == self._aside else like(leaf, part.reshape(shape)))
        replacements = iter(found)
        return nests.rebuilt(self._nest, lambda _: next(replacements))


def _may_wrap(dtype: Any, op: str) -> bool:
    return op in ("sum", "product") and getattr(dtype, "kind", "") in ("i", "u")


def _shortened(described: Sequence[str]) -> str:
    """Returns them joined: a few in words, and all in a digest."""
    if len(described) <= 4:
        return ", ".join(described)
    import hashlib

    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()[:12]
    return f"{', '.join(described[:3])}, .. ({len(described)} leaves, {digest})"


def check_not_traced(leaf: Any) -> None:
    """Raises TypeError for a leaf with which JAX traces a function: it has no value."""
    jax = loaded_module("jax")
    if jax is not None and isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            "replicas exchange values in calls of Python, which JAX cannot compile: in a function "
            "under jax.jit (or grad, vmap, scan) there are no values yet. Compile what computes the "
            "gradients, and what applies the updates; between them, outside of jax.jit, call the "
            "collective, or update() of an optimizer from wrap_optimizer"
        )


def as_numpy(leaf: Any, path: str = "") -> Array:
    """Returns a number or an array as an array of numpy; on a CPU it may share its memory."""
    import numpy as np

    kind = nests.kind(leaf)
    array: Array | None = None
    if kind == "torch":
        tensor = leaf.detach().cpu()
        # numpy has no bfloat16, and sums of 16 bits lose too much.
        is_low = tensor.is_floating_point() and tensor.element_size() < 4
        with contextlib.suppress(TypeError, RuntimeError):  # sparse, quantized, ..
            array = (tensor.float() if is_low else tensor).contiguous().numpy()
    elif kind and not isinstance(leaf, np.ma.MaskedArray):
        array = np.asarray(leaf)
        if "float" in array.dtype.name and array.itemsize < 4:
            array = array.astype(np.float32)
    if array is None or array.dtype.kind not in "biufc":
        facts = [str(getattr(leaf, name)) for name in ("dtype", "layout") if hasattr(leaf, name)]
        what = type(leaf).__name__ + (f" of {', '.join(facts)}" if facts else "")
        raise TypeError(
            f"{path or 'the value'} is {what}: replicas combine numbers, and dense arrays of numbers "
            "(numpy, PyTorch, JAX) in dicts, lists, tuples and dataclasses"
        )
    return array


def like(leaf: Any, array: Array) -> Any:
    """Returns an array in the kind, device and layout of a leaf; means of integers stay floats."""
    kind = nests.kind(leaf)
    if kind == "torch":
        torch = loaded_module("torch")
        keeps = leaf.dtype.is_floating_point or leaf.dtype.is_complex or array.dtype.kind != "f"
        tensor = torch.from_numpy(array)
        tensor = tensor.to(leaf.device, leaf.dtype) if keeps else tensor.to(leaf.device)
        if leaf.is_contiguous():
            return tensor
        return torch.empty_like(leaf.detach(), dtype=tensor.dtype).copy_(tensor)
    keeps = kind != "number" and (leaf.dtype.kind not in "iub" or array.dtype.kind != "f")
    if kind == "jax":
        jax = loaded_module("jax")
        return jax.device_put(array.astype(leaf.dtype) if keeps else array, leaf.sharding)
    if kind == "number":
        value = array.item()
        return type(leaf)(value) if array.dtype.kind != "f" else value
    array = array.astype(leaf.dtype, copy=False) if keeps else array
    return array[()] if array.ndim == 0 else array


def combined(results: Sequence[Any], op: Op) -> Any:
    packed = [Packed(each, op) for each in results]
    if differing := {each.text for each in packed} - {packed[0].text}:
        raise ValueError(f"results differ in structure: {packed[0].text} and {min(differing)}")
    for name, array in packed[0].arrays.items():
        operation = ArrayOperation(op, array.dtype, len(results))
        operation.combine([each.arrays[name] for each in packed], array, last=True)
    return packed[0].unpacked()
