"""Optimizers that get gradients as arguments, as optax's: averages these over the replicas."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from courier.lowlevel import signature_of


def averaging(optimizer: Any, mean: Callable[[Any], Any]) -> Any:
    """Returns an optimizer that averages gradients first, by `mean` of nested values.

    The optimizer has `update(gradients, ...)` or `apply_gradients(gradients, ...)`, as optax's; or
    it is a function of gradients. TypeError: it is nothing of this kind.
    """
    names = "update", "apply_gradients"
    methods = [name for name in names if callable(getattr(optimizer, name, None))]
    if isinstance(optimizer, (type, Mapping, set)) or not (methods or callable(optimizer)):
        raise TypeError(
            "wrap_optimizer takes an optimizer of PyTorch, something with update(gradients, ...) or "
            f"apply_gradients(gradients, ...), or a function of gradients; not {optimizer!r}"
        )
    if not methods:
        return _of_means(optimizer, mean)
    if hasattr(optimizer, "_replace"):  # a named tuple of functions, as in optax
        return optimizer._replace(
            **{name: _of_means(getattr(optimizer, name), mean) for name in methods}
        )
    return Averaging(optimizer, methods, mean)


class Averaging:
    """Averages gradients, and then calls another optimizer, whose attributes it has."""

    def __init__(self, optimizer: Any, methods: list[str], mean: Callable[[Any], Any]) -> None:
        changed = {name: _of_means(getattr(optimizer, name), mean) for name in methods}
        vars(self).update(changed, _averaged=optimizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_averaged" not in vars(self):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._averaged, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._averaged, name, value)


def _of_means(function: Callable[..., Any], mean: Callable[[Any], Any]) -> Callable[..., Any]:
    first = next(iter(signature_of(function).parameters), "")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = mean(args[0]), *args[1:]
        elif first in kwargs:
            kwargs[first] = mean(kwargs[first])
        return function(*args, **kwargs)

    return call
