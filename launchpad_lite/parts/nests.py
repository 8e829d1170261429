"""Nested values: finds their leaves, replaces them, and compares nests.

Leaves are arrays of numpy, tensors of PyTorch, arrays of JAX, and numbers. None of these packages
is imported here: a value of theirs can only be there if it is imported.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from courier.lowlevel import loaded_module

#: Types whose values are leaves without an array.
_NUMBERS = (bool, int, float, complex)


def kind(value: Any) -> str:
    """Returns the kind of a leaf: `numpy`, `torch`, `jax`, `number`, or empty if it is none."""
    numpy, torch, jax = (loaded_module(name) for name in ("numpy", "torch", "jax"))
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return "numpy"
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch"
    if jax is not None and isinstance(value, jax.Array):
        return "jax"
    return "number" if isinstance(value, _NUMBERS) else ""


def children(value: Any) -> "dict[str, Any] | None":
    """Returns the parts of a nested value by the name to show; None: it has none, and is a leaf.

    Those of a mapping come in the order of its keys as text, in whatever order it has them.
    """
    if isinstance(value, Mapping):
        return {f"[{key!r}]": value[key] for key in sorted(value, key=repr)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {f".{name}": part for name, part in zip(value._fields, value, strict=True)}
    if isinstance(value, (list, tuple)):
        return {f"[{index}]": part for index, part in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {f".{name}": getattr(value, name) for name in names}
    return {} if value is None else None


def leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all leaves with the path to each, as `['loss'][0]`, in order."""
    parts = children(nest)
    if parts is None:
        yield path, nest
        return
    for name, part in parts.items():
        yield from leaves(part, path + name)


def rebuilt(nest: Any, replace: Callable[[Any], Any]) -> Any:
    """Returns a copy with other leaves; asks for them in the order of `leaves`."""
    parts = children(nest)
    if parts is None:
        return replace(nest)
    new = [rebuilt(part, replace) for part in parts.values()]
    if isinstance(nest, Mapping):
        items = dict(zip(sorted(nest, key=repr), new, strict=True))
        return _mapping(nest, {key: items[key] for key in nest})
    if isinstance(nest, (list, tuple)):
        return sequence_like(nest, new)
    if nest is None:
        return None
    named = dict(zip((field.name for field in dataclasses.fields(nest)), new, strict=True))
    try:
        return dataclasses.replace(nest, **named)
    except (TypeError, ValueError):  # its constructor takes other arguments
        like = copy.copy(nest)
        for name, part in named.items():
            object.__setattr__(like, name, part)  # it may be frozen
        return like


def sequence_like(sequence: Any, parts: list[Any]) -> Any:
    """Returns parts as a list, or the kind of tuple that another one is."""
    if isinstance(sequence, list):
        return parts
    return type(sequence)(*parts) if hasattr(sequence, "_fields") else tuple(parts)


def _mapping(like: "Mapping[Any, Any]", items: "dict[Any, Any]") -> Any:
    if isinstance(like, collections.defaultdict):
        return type(like)(like.default_factory, items)
    return items if type(like) is dict else type(like)(items)  # type: ignore[call-arg]


def structure_of(nest: Any, path: str) -> dict[str, str]:
    """Returns the type and shape of each leaf, by its path."""
    return {where: described(leaf) for where, leaf in leaves(nest, path)}


def described(leaf: Any, first_axis: int = 0) -> str:
    """Returns the type and the shape of an array, from an axis on, or the type of another leaf."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype} of shape {tuple(leaf.shape)[first_axis:]}"
    return type(leaf).__name__


def difference(old: dict[str, str], new: dict[str, str]) -> str:
    """Returns the first difference of two structures, for people."""
    missing, more = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if missing:
        return f"{missing[0]} is missing"
    if more:
        return f"{more[0]} is new"
    path = next(path for path in old if old[path] != new[path])
    return f"{path} is {new[path]}, and was {old[path]}"
