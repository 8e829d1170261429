"""Optimizers of PyTorch that take the mean of gradients, or of parameters, over replicas.

The optimizer stays the same object, with hooks and a few more methods. So schedulers, `GradScaler`
and `state_dict` work as usual.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from launchpad_lite.parts import nests
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._torch_buckets import Bucket, make_buckets
from launchpad_lite.replicas.errors import CollectiveMismatchError, ReplicaError

BUCKET_BYTES = 25 << 20


def wrap(
    optimizer: Any,
    collectives: Collectives,
    *,
    model: Any = None,
    buffers: Literal["own", "broadcast"] = "own",
    overlap: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    every: int | None = None,
    outer: Callable[[list[Any]], Any] | None = None,
    label: str = "",
) -> Any:
    """Makes an optimizer take the same steps in all replicas; returns this optimizer.

    docs/replicas.md has what users see of it. A parameter without a gradient in some replicas counts
    as zero there; one that has none in any replica keeps None. A `closure` returns the mean loss.

    Without `overlap`, means are taken in `step()`, or `synchronize()`. This is needed where parts
    of the model run in some replicas only while its backward pass has collectives of its own, and
    where `checkpoint(use_reentrant=True)` makes a gradient come twice, which raises an error.
    """
    if hasattr(optimizer, "no_sync"):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; make a new one")
    if every is None and outer is not None:
        raise ValueError("outer needs every=: after how many steps it makes one")
    if every is not None and every < 1:
        raise ValueError(f"every is a number of steps, at least 1, not {every}")
    if buffers not in ("own", "broadcast") or (buffers == "broadcast" and model is None):
        raise ValueError(f"buffers is 'own', or 'broadcast' with a model=, not {buffers!r}")
    label = label or type(optimizer).__name__
    of_model = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
    _take_from_first(collectives, _named(optimizer.param_groups, of_model), label)
    if every is None:
        _Average(collectives, optimizer, overlap, bucket_bytes, label)
    else:
        _Outer(collectives, optimizer, every, outer or _plain, bucket_bytes, label)
    if buffers == "broadcast":
        optimizer.register_step_post_hook(
            lambda *_: _copy_first(collectives, list(model.buffers()), f"buffers of {label}")
        )
    return optimizer


def check_names(collectives: Collectives, kept: Any) -> None:
    """Checks that optimizers among kept things have the parameters of models there in one order."""
    import torch

    things = [thing for _, thing in nests.leaves(kept)]
    models = [thing for thing in things if isinstance(thing, torch.nn.Module)]
    of_models = [pair for model in models for pair in model.named_parameters()]
    for thing in things:
        if isinstance(thing, torch.optim.Optimizer):
            named = _named(thing.param_groups, of_models)
            _check_same(collectives, _texts(named), f"parameters of {type(thing).__name__}")


def _plain(parameters: list[Any]) -> Any:
    """Returns an optimizer whose step is the mean of the replicas."""
    import torch

    return torch.optim.SGD(parameters, lr=1.0)


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(groups: Sequence[Any], of_model: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns all tensors of groups and of a model, once each, with their names as far as known."""
    of_groups = [
        pair
        for group in groups
        for pair in itertools.zip_longest(group.get("param_names", ()), group["params"])
    ]
    names = {id(tensor): name for name, tensor in [*of_groups, *of_model]}
    tensors = {id(tensor): tensor for _, tensor in [*of_groups, *of_model]}
    return [(names[key] or "", tensor) for key, tensor in tensors.items()]


def _texts(named: Sequence[tuple[str, Any]]) -> list[str]:
    return [f"{name} {tensor.dtype}{list(tensor.shape)}".strip() for name, tensor in named]


def _check_same(collectives: Collectives, mine: Sequence[str], label: str) -> None:
    """Raises CollectiveMismatchError unless all replicas have the same things in the same order."""
    first, *others = collectives.all_gather(mine, label)
    for rank, other in enumerate(others, 1):
        pairs = itertools.zip_longest(first, other, fillvalue="nothing")
        for number, (one, another) in enumerate(pairs):
            if one != another:
                raise CollectiveMismatchError(
                    f"{label}: number {number} is {one} in replica 0, and {another} in replica "
                    f"{rank}; all replicas have the same ones in the same order"
                )


def _take_from_first(
    collectives: Collectives, named: Sequence[tuple[str, Any]], label: str
) -> None:
    """Makes tensors those of replica 0, which have the same names there."""
    if collectives.size > 1:
        _check_same(collectives, _texts(named), f"parameters of {label}")
        _copy_first(collectives, [tensor for _, tensor in named], f"parameters of {label}")


def _copy_first(collectives: Collectives, tensors: Sequence[Any], label: str) -> None:
    import torch

    first = collectives.broadcast([tensor.detach() for tensor in tensors], 0, label)
    with torch.no_grad():
        for tensor, value in zip(tensors, first, strict=True):
            tensor.copy_(value)


class _Average:
    def __init__(
        self, collectives: Collectives, optimizer: Any, overlap: bool, bucket_bytes: int, label: str
    ) -> None:
        self._collectives = collectives
        # It has this one, and is freed when nothing else refers to it.
        self._optimizer = weakref.ref(optimizer)
        self._overlap = overlap
        self._bucket_bytes = bucket_bytes
        self._label = label
        self._buckets: list[Bucket] = []
        self._launched = 0  # buckets of this pass
        self._in_pass = False
        self._is_mean = False  # all gradients are, now
        self._paused = 0
        #: Other averages whose buckets have some of its parameters.
        self._others: list[_Average] = []
        self._add_new()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.zero_grad = self.zero_grad
        optimizer.add_param_group = self.add_param_group
        optimizer.synchronize = self.synchronize
        optimizer.no_sync = self.no_sync

    @property
    def _together(self) -> "list[_Average]":
        return [self, *self._others]

    # Called by users.

    def synchronize(self) -> None:
        """Takes the means, unless they are taken."""
        for each in self._together:
            if not each._is_mean:
                each._finish_pass()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a block in which gradients stay those of this replica."""
        for each in self._together:
            each._paused += 1
        try:
            yield
        finally:
            for each in self._together:
                each._paused -= 1

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients; takes the arguments of the optimizer's method."""
        for each in self._together:
            each._abandon_pass()
            each._is_mean = False
        optimizer: Any = self._optimizer()
        type(optimizer).zero_grad(optimizer, *args, **kwargs)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds parameters, which become those of replica 0."""
        optimizer: Any = self._optimizer()
        type(optimizer).add_param_group(optimizer, group)
        added = _named(optimizer.param_groups[-1:], ())
        _take_from_first(self._collectives, added, self._label)
        self._add_new()

    # Called by PyTorch.

    def _before_step(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # The first of `args` is the optimizer.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.synchronize()
            return None
        return args[:1], {**kwargs, "closure": lambda: self._evaluate(closure)}

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Returns the mean of the losses: decisions that depend on it are the same everywhere."""
        loss = closure()
        self.synchronize()
        loss = loss.detach() if hasattr(loss, "detach") else loss
        return self._collectives.all_reduce(loss, "mean", f"loss of {self._label}")

    def _after_step(self, *_: Any) -> None:
        for each in self._together:
            each._is_mean = False

    def _on_gradient(self, bucket: Bucket, index: int, parameter: Any) -> None:
        """A backward pass has added to a gradient."""
        self._is_mean = False
        if self._paused or not self._overlap:
            return
        if not self._in_pass:
            self._begin_pass()
        if index not in bucket.missing:
            raise ReplicaError(
                f"{self._label}: the gradient of a parameter of shape {list(parameter.shape)} came "
                "twice in one backward pass, as it does with checkpoint(use_reentrant=True); use "
                "use_reentrant=False, or wrap_optimizer(..., overlap=False)"
            )
        bucket.take(index, parameter)
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch()

    # A pass over all buckets.

    def _begin_pass(self) -> None:
        from torch.autograd import Variable

        self._reset()
        self._in_pass = True
        Variable._execution_engine.queue_callback(self._finish_pass)

    def _reset(self) -> None:
        self._launched = 0
        for bucket in self._buckets:
            bucket.begin()

    def _finish_pass(self) -> None:
        """Launches the rest, and waits for all."""
        if not self._in_pass:
            self._reset()
        self._in_pass = False
        self._add_new()
        while self._launched < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            bucket.finish()
        self._is_mean = True

    def _launch(self) -> None:
        label = f"gradients of {self._label}, bucket {self._launched}"
        self._buckets[self._launched].launch(label)
        self._launched += 1

    def _abandon_pass(self) -> None:
        """Waits for the launched means of a backward pass that has failed."""
        if self._in_pass:
            self._in_pass = False
            for bucket in self._buckets[: self._launched]:
                bucket.wait()

    def _add_new(self) -> None:
        """Makes buckets for parameters that have none: first, added, or newly trained ones."""
        optimizer = self._optimizer()
        if self._collectives.size == 1 or optimizer is None:
            return
        mine = {id(each): each for each in _parameters(optimizer)}
        wanted = {key for key, each in mine.items() if each.requires_grad}
        wanted = wanted.difference(*[each._known() for each in self._together])
        if not wanted:
            return
        for other in self._collectives.averages.values():
            if wanted & other._known():
                self._others.append(other)
                wanted -= other._known()
        if not wanted:
            return
        new = {key: each for key, each in mine.items() if key in wanted}
        numbers = [f"parameter {number}" for number, key in enumerate(mine) if key in new]
        _check_same(self._collectives, numbers, f"what {self._label} trains")
        for bucket in make_buckets(self._collectives, list(new.values()), self._bucket_bytes):
            self._listen(len(self._buckets), bucket)
            self._buckets.append(bucket)

    def _known(self) -> set[int]:
        return {id(each) for bucket in self._buckets for each in bucket.parameters()}

    def _listen(self, number: int, bucket: Bucket) -> None:
        # A weak reference: PyTorch keeps hooks where Python does not collect cycles.
        me = weakref.ref(self)

        def on_gradient(index: int, parameter: Any) -> None:
            average = me()
            if average is not None:
                average._on_gradient(average._buckets[number], index, parameter)

        for index, parameter in enumerate(bucket.parameters()):
            parameter.register_post_accumulate_grad_hook(functools.partial(on_gradient, index))
        # This lives as long as one of the parameters has the hook, also without the optimizer.
        self._collectives.averages[on_gradient] = self


class _Outer:
    """Takes the mean of parameters after some steps, and makes a step of an outer optimizer."""

    def __init__(
        self,
        collectives: Collectives,
        optimizer: Any,
        every: int,
        outer: Callable[[list[Any]], Any],
        bucket_bytes: int,
        label: str,
    ) -> None:
        self._every = every
        self._label = label
        self._steps = 0  # since the last mean
        self._parameters = [each for each in _parameters(optimizer) if each.requires_grad]
        self._shared = [_exact_copy(parameter) for parameter in self._parameters]
        self._buckets = make_buckets(collectives, self._shared, bucket_bytes)
        self.optimizer = outer(self._shared)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_post_hook(self._add_state)
        optimizer.register_load_state_dict_pre_hook(self._load_state)
        optimizer.outer = self.optimizer
        optimizer.synchronize = self.synchronize
        optimizer.no_sync = contextlib.nullcontext
        optimizer.add_param_group = self.add_param_group

    def synchronize(self) -> None:
        """Makes the outer step now, unless it is made."""
        if self._steps:
            self._outer_step()

    def add_param_group(self, _: dict[str, Any]) -> None:
        raise ReplicaError(f"{self._label}: with every=, add all parameters before wrap_optimizer")

    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        if self._steps >= self._every:
            self._outer_step()

    def _outer_step(self) -> None:
        import torch

        with torch.no_grad():
            for shared, parameter in self._pairs():
                shared.grad = shared - parameter
            for number, bucket in enumerate(self._buckets):
                bucket.begin()
                bucket.launch(f"outer step of {self._label}, bucket {number}")
            for bucket in self._buckets:
                bucket.finish()
            self.optimizer.step()
            for shared, parameter in self._pairs():
                parameter.copy_(shared)
        self._steps = 0

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        return zip(self._shared, self._parameters, strict=True)

    def _add_state(self, _: Any, state: dict[str, Any]) -> None:
        state["outer"] = {
            "optimizer": self.optimizer.state_dict(),
            "shared": self._shared,
            "steps": self._steps,
        }

    def _load_state(self, _: Any, state: dict[str, Any]) -> None:
        import torch

        if (outer := state.get("outer")) is None:
            return
        self.optimizer.load_state_dict(outer["optimizer"])
        self._steps = outer["steps"]
        with torch.no_grad():
            for mine, saved in zip(self._shared, outer["shared"], strict=True):
                mine.copy_(saved)


def _exact_copy(parameter: Any) -> Any:
    """Returns a copy in at least 32 bits, so that small differences are not lost."""
    import torch

    low = parameter.dtype in (torch.float16, torch.bfloat16)
    return parameter.detach().to(torch.float32 if low else parameter.dtype, copy=True)
