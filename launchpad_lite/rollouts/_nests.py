"""Nested values, of dicts, lists and tuples: their leaves in one order, and how they differ."""

from collections.abc import Callable, Iterator
from typing import Any


def leaves(nest: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the place of each leaf, and the leaf."""
    if isinstance(nest, dict):
        for name in sorted(nest, key=repr):
            yield from leaves(nest[name], f"{path}[{name!r}]")
    elif isinstance(nest, list | tuple):
        for index, each in enumerate(nest):
            yield from leaves(each, f"{path}[{index}]")
    else:
        yield path, nest


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """Returns a nest with the results of a function for each leaf, in the order of `leaves`."""
    if isinstance(nest, dict):
        parts = {name: map_leaves(function, nest[name]) for name in sorted(nest, key=repr)}
        return {name: parts[name] for name in nest}
    if isinstance(nest, list | tuple):
        items = [map_leaves(function, each) for each in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    return function(nest)


def structure_of(nest: Any, path: str) -> dict[str, str]:
    """Returns the kind of each leaf, by its place."""
    return {where: kind_of(leaf) for where, leaf in leaves(nest, path)}


def kind_of(leaf: Any, first_axis: int = 0) -> str:
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
