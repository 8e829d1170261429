"""Flat memory for the gradients of many parameters, averaged over the replicas as one."""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from launchpad_lite.replicas._collectives import Collectives

_FIRST_BYTES = 1 << 20  # so that the first mean begins soon


class Bucket:
    """Gradients of some parameters, next to each other.

    It holds no parameter: the user's code decides how long there is one. `gradients` are views of
    its memory, for the `grad` of each; those with indices in `missing` are not filled in this pass.
    """

    def __init__(self, collectives: Collectives, parameters: Sequence[Any]) -> None:
        """Makes the memory for parameters of one type, on one device."""
        import torch
        from torch.utils.weak import TensorWeakRef

        self._collectives = collectives
        self._parameters = [TensorWeakRef(each) for each in parameters]
        self.missing: set[int] = set(range(len(parameters)))
        self._future: Future[None] | None = None
        first = parameters[0]
        self._count = sum(parameter.numel() for parameter in parameters)
        # The tail marks gradients that exist: its mean is above 0 if any replica has one.
        self._sent, self._array = _sent(collectives, first, self._count + len(parameters))
        if self._sent.dtype == first.dtype and self._sent.device == first.device:
            self._memory = self._sent[: self._count]
        else:
            self._memory = torch.zeros(self._count, dtype=first.dtype, device=first.device)
        self.gradients = _views(self._memory, parameters)

    def parameters(self) -> list[Any]:
        """Returns the parameters of these gradients that still exist."""
        return [each for parameter in self._parameters if (each := parameter()) is not None]

    def begin(self) -> None:
        """Begins a pass: all gradients are missing."""
        self.missing = set(range(len(self._parameters)))

    def take(self, index: int, parameter: Any) -> None:
        """Moves the gradient of a parameter, which has one, into the memory."""
        gradient, mine = parameter.grad, self.gradients[index]
        if gradient is not mine:
            if gradient.is_sparse:
                raise TypeError(
                    f"a parameter of shape {list(parameter.shape)} has a sparse gradient, which "
                    "wrap_optimizer cannot average; use Embedding(sparse=False)"
                )
            mine.copy_(gradient.detach())
            parameter.grad = mine
        self.missing.discard(index)

    def launch(self, label: str) -> None:
        """Adds missing gradients, and begins to take the mean."""
        for index in list(self.missing):
            parameter = self._parameters[index]()
            if parameter is not None and parameter.grad is not None:
                self.take(index, parameter)
            else:
                self.gradients[index].zero_()
        if self._collectives.rank in self._collectives.idle:
            self.missing = set(range(len(self.gradients)))  # the other replicas decide which exist
        there = self._sent[self._count :]
        there.fill_(1)
        for index in self.missing:
            there[index] = 0
        if self._memory.data_ptr() != self._sent.data_ptr():
            self._sent[: self._count].copy_(self._memory)
        if self._sent.is_cuda:
            _wait_for_gradients(self._sent.device)
        self._future = self._collectives.reduce_later(self._array, "mean", label)

    def wait(self) -> None:
        if self._future is not None:
            wait([self._future])

    def finish(self) -> None:
        """Waits for the mean, which is then the `grad` of all parameters."""
        assert self._future is not None
        self._collectives.finish(self._future)
        if self._memory.data_ptr() != self._sent.data_ptr():
            self._memory.copy_(self._sent[: self._count])
        if self.missing:
            there = self._sent[self._count :].tolist()
            for index in self.missing:
                if (parameter := self._parameters[index]()) is not None:
                    parameter.grad = self.gradients[index] if there[index] else None


def make_buckets(
    collectives: Collectives, parameters: Sequence[Any], bucket_bytes: int
) -> list[Bucket]:
    """Returns buckets in the order in which a backward pass fills them, the last layer first."""
    groups: list[list[Any]] = []
    open_groups: dict[Any, list[Any]] = {}
    for parameter in reversed(parameters):
        if parameter.is_complex():
            raise TypeError("wrap_optimizer cannot average complex parameters; keep two real ones")
        kind = parameter.dtype, parameter.device
        group = open_groups.setdefault(kind, [])
        if not group:
            groups.append(group)
        group.append(parameter)
        limit = bucket_bytes if len(groups) > 1 else min(bucket_bytes, _FIRST_BYTES)
        if sum(each.numel() * each.element_size() for each in group) >= limit:
            del open_groups[kind]
    return [Bucket(collectives, group) for group in groups]


def _sent(collectives: Collectives, like: Any, count: int) -> tuple[Any, Any]:
    """Returns memory to send, as a tensor, and in the form for `reduce_later`."""
    import numpy as np
    import torch

    if like.is_cuda and collectives.takes(like.device):
        tensor = torch.zeros(count, dtype=like.dtype, device=like.device)
        return tensor, tensor
    # numpy has no bfloat16, and sums in float16 lose too much.
    dtype = np.float64 if like.dtype == torch.float64 else np.float32
    array = collectives.buffer(count * np.dtype(dtype).itemsize).view(dtype)
    return torch.from_numpy(array), array


def _views(memory: Any, parameters: Sequence[Any]) -> list[Any]:
    """Returns a part of the memory for each parameter, laid out as it is."""
    views, begin = [], 0
    for parameter in parameters:
        part = memory[begin : begin + parameter.numel()]
        begin += parameter.numel()
        if _is_dense(parameter):
            views.append(part.as_strided(parameter.shape, parameter.stride()))
        else:
            views.append(part.view(parameter.shape))
    return views


def _is_dense(parameter: Any) -> bool:
    """Returns whether the elements lie next to each other, in whatever order of dimensions."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    return bool(1 + sum((length - 1) * stride for length, stride in steps) == parameter.numel())


def _wait_for_gradients(device: Any) -> None:
    """Makes the default stream, on which the mean follows, wait for the stream of this thread."""
    import torch

    default, mine = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
    if default != mine:
        default.wait_stream(mine)
