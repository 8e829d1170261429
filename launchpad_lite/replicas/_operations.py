"""Operations that combine numpy arrays."""

from collections.abc import Sequence
from typing import Any

from launchpad_lite.replicas._carrier import Array, Op

_UFUNCS = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum", "product": "multiply"}
#: Bytes of each array that are combined at a time: they stay in the caches of a core.
_BLOCK_BYTES = 1 << 17


class ArrayOperation:
    def __init__(self, op: Op, dtype: Any, size: int) -> None:
        import numpy as np

        if op not in _UFUNCS:
            raise ValueError(f"{op!r} is no operation; there are: {', '.join(_UFUNCS)}")
        if dtype.kind == "b" and op not in ("max", "min"):
            raise TypeError(f"the {op} of booleans has no meaning here; convert them, or use max")
        if dtype.kind in "iu" and op == "mean":
            raise TypeError(f"the mean of {dtype} is no {dtype}; convert the values to float first")
        if dtype.kind == "c" and op in ("max", "min"):
            raise TypeError(f"complex numbers have no order, so there is no {op}")
        if dtype.hasobject:
            raise TypeError("arrays of Python objects cannot be combined; use all_gather")
        self.join = getattr(np, _UFUNCS[op])
        self._divisor = dtype.type(size) if op == "mean" else None

    def combine(
        self, arrays: Sequence[Array], out: Array, *, last: bool, copies: Sequence[Array] = ()
    ) -> Array:
        """Combines arrays in their order; returns `out`.

        `out` gets the result, and so do the `copies`, which may be among the arrays. `out` may be
        the first of the arrays, and must be no other. `last`: these are of all replicas.
        """
        for begin, end in blocks(len(out), out.itemsize):
            result = out[begin:end]
            first, *others = [array[begin:end] for array in arrays]
            if not others:
                result[:] = first
            for other in others:
                self.join(first, other, out=result)
                first = result
            if last and self._divisor is not None:
                result /= self._divisor
            for copy in copies:
                copy[begin:end] = result
        return out


def leave_out(array: Any, op: Op) -> None:
    """Fills an array, or replaces arrays of JAX in a list, with values that change no result."""
    if not isinstance(array, list):
        array[...] = _neutral(op, array.dtype)
        return
    from jax.numpy import full_like

    array[:] = [full_like(leaf, _neutral(op, leaf.dtype)) for leaf in array]


def _neutral(op: Op, dtype: Any) -> Any:
    import numpy as np

    if op not in ("max", "min"):
        return int(op == "product")
    limits: tuple[Any, Any] = -np.inf, np.inf
    if dtype.kind in "iu":
        limits = np.iinfo(dtype).min, np.iinfo(dtype).max
    return (limits if dtype.kind != "b" else (False, True))[op == "min"]


def blocks(length: int, itemsize: int, nbytes: int = _BLOCK_BYTES) -> list[tuple[int, int]]:
    """Returns the bounds of the parts of an array, in items; none of an empty array."""
    step = max(1, nbytes // itemsize)
    return [(begin, min(begin + step, length)) for begin in range(0, length, step)]


def share(length: int, index: int, size: int) -> tuple[int, int]:
    """Returns the bounds of one of `size` parts that differ by one item at most."""
    return length * index // size, length * (index + 1) // size
