"""Collectives on nested values with tensors of PyTorch that need gradients.

A sum over replicas counts in the loss of every replica, so its gradient is the sum of their gradients:
the training minimises the sum of all losses; or their mean, where `wrap_optimizer` averages
gradients.

The backward pass makes a collective for each one of the forward pass. So each of them counts in the
loss of all replicas or of none, and its tensors need a gradient in all replicas or in none.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from launchpad_lite.launching import loaded_module
from launchpad_lite.parts import nests
from launchpad_lite.replicas._carrier import Op
from launchpad_lite.replicas._collectives import Collectives


def needs_gradient(nest: Any) -> bool:
    torch = loaded_module("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in _tensors(nest))


def all_reduce(collectives: Collectives, nest: Any, op: Op = "sum", label: str = "") -> Any:
    if op not in ("sum", "mean"):
        raise ValueError(
            f"there is no gradient of all_reduce({op!r}); use sum or mean, or tensors without "
            "gradient: tensor.detach()"
        )
    return _through(
        _tensors(nest),
        lambda: collectives.all_reduce(nest, op, label),
        lambda gradients: _reduced(collectives, gradients, op, label),
    )


def all_gather(collectives: Collectives, nest: Any, label: str = "") -> list[Any]:
    """Returns the nested values of all replicas, by replica; each has at least one tensor."""
    mine = slice(0, 0)

    def gather() -> list[Any]:
        nonlocal mine
        device = _tensors(nest)[0].device
        detached = _with_tensors(nest, lambda tensor: tensor.detach())
        everyone = collectives.all_gather(detached, label)
        begin = len(_tensors(everyone[: collectives.rank]))
        mine = slice(begin, begin + len(_tensors(nest)))
        # A copy: results share no memory with the argument.
        everyone[collectives.rank] = _with_tensors(detached, lambda tensor: tensor.clone())
        return [_with_tensors(each, lambda tensor: tensor.to(device)) for each in everyone]

    result: list[Any] = _through(
        _tensors(nest),
        gather,
        lambda gradients: _reduced(collectives, gradients, "sum", label)[mine],
    )
    return result


def broadcast(collectives: Collectives, nest: Any, source: int = 0, label: str = "") -> Any:
    def backward(gradients: Sequence[Any]) -> list[Any]:
        total = _reduced(collectives, gradients, "sum", label)
        return total if collectives.rank == source else [None] * len(total)

    return _through(_tensors(nest), lambda: collectives.broadcast(nest, source, label), backward)


def _reduced(collectives: Collectives, gradients: Sequence[Any], op: Op, label: str) -> list[Any]:
    """Returns gradients, combined over the replicas; None for other types than floating-point."""
    real = [each.is_floating_point() or each.is_complex() for each in gradients]
    given = [each for each, is_real in zip(gradients, real, strict=True) if is_real]
    # Through this function again: a gradient may have a gradient.
    found = iter(
        all_reduce(collectives, given, op, f"gradient of {label}" if label else "gradient")
    )
    return [next(found) if is_real else None for is_real in real]


def _through(
    tensors: Sequence[Any],
    forward: Callable[[], Any],
    backward: Callable[[Sequence[Any]], Sequence[Any]],
) -> Any:
    """Returns the result of `forward`; gradients of its tensors go to these ones by `backward`."""
    kept: list[Any] = []
    outputs = iter(_function().apply(forward, backward, kept, *tensors))
    return _with_tensors(kept[0], lambda _: next(outputs))


@functools.cache
def _function() -> Any:
    from torch.autograd import Function

    class Through(Function):  # type: ignore[misc]  # mypy does not read torch
        """A call that is made outside of autograd, and another one for its gradients."""

        @staticmethod
        def forward(
            context: Any,
            forward: Callable[[], Any],
            backward: Callable[[Sequence[Any]], Sequence[Any]],
            kept: list[Any],
            *_: Any,
        ) -> tuple[Any, ...]:
            context.call = backward
            kept.append(forward())
            return tuple(_tensors(kept[0]))

        @staticmethod
        def backward(context: Any, *gradients: Any) -> tuple[Any, ...]:
            return (None, None, None, *context.call(gradients))

    return Through


def _tensors(nest: Any) -> list[Any]:
    return [leaf for _, leaf in nests.leaves(nest) if _is_tensor(leaf)]


def _with_tensors(nest: Any, replace: Callable[[Any], Any]) -> Any:
    return nests.rebuilt(nest, lambda leaf: replace(leaf) if _is_tensor(leaf) else leaf)


def _is_tensor(leaf: Any) -> bool:
    return nests.kind(leaf) == "torch"
