"""Optimizers of PyTorch that take the mean of gradients, or of parameters, over replicas.

The optimizer stays what it is: it gets hooks, and a few methods more. So schedulers, `GradScaler` and
`state_dict` work as ever.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from launchpad_lite.replicas._torch_buckets import Bucket, make_buckets
from launchpad_lite.replicas.errors import ReplicaError

if TYPE_CHECKING:
    from launchpad_lite.replicas._collectives import Collectives

BUCKET_BYTES = 25 << 20


def wrap(
    optimizer: Any,
    collectives: "Collectives",
    *,
    model: Any = None,
    overlap: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    every: int | None = None,
    outer: Callable[[list[Any]], Any] | None = None,
    label: str = "",
) -> Any:
    """Has an optimizer make the same steps in all replicas; returns this optimizer.

    Parameters become those of replica 0. From then on, a backward pass leaves means over the replicas
    in `grad`: they are taken while it goes on. A parameter without a gradient in some replicas counts
    as zero there; one that has none in any replica keeps None. A `closure` returns the mean loss.

    Gradients that `step()` has used, and that nobody has cleared, are not averaged before the next
    `step()`: so what the loss of a generator leaves in its discriminator costs nothing.

    The optimizer has two methods more:
        no_sync(): A block whose backward passes only add up gradients of this replica. The mean is
            taken at the end of the first backward pass after it, or in `step()`.
        synchronize(): Takes the means now, if they are not taken yet. To be called before gradients
            are clipped or unscaled, where a backward pass has not done it: with `overlap=False`,
            after `no_sync`, and after `model.zero_grad(set_to_none=False)`.

    With `every`, gradients stay those of the replica. After every so many steps, replicas take the mean
    of how far they have come (local SGD), and an outer optimizer makes a step with it (DiLoCo, arXiv
    2311.08105), which is `optimizer.outer`. `synchronize()` does it before that.

    Args:
        optimizer: Any `torch.optim.Optimizer`.
        collectives: Of this replica.
        model: Its other parameters, and its buffers, become those of replica 0, too.
        overlap: Whether to take means in the backward pass; else in `step()`, or `synchronize()`.
            False is needed where parts of the model run in some replicas only while its backward pass
            has collectives of its own, and for some uses of `checkpoint(use_reentrant=True)`.
        bucket_bytes: How much is averaged at a time.
        every: Steps between two means of the parameters.
        outer: Makes the outer optimizer for a list of parameters; by default plain averaging.
        label: Names its calls in errors.

    Raises:
        TypeError: It is no optimizer of PyTorch, or has complex parameters.
        ValueError: It is wrapped already, or `every` is missing or below 1.
        ReplicaError: In a backward pass: a gradient came twice. See `overlap`.
        CollectiveMismatchError: Parameters differ in number, type or shape.
    """
    _check(optimizer, every, outer)
    label = label or type(optimizer).__name__
    parameters = _parameters(optimizer)
    others = [] if model is None else [*model.parameters(), *model.buffers()]
    _take_from_first(collectives, [*parameters, *others], label)
    if every is None:
        _Average(collectives, optimizer, overlap, bucket_bytes, label)
    else:
        _Outer(collectives, optimizer, every, outer or _plain, bucket_bytes, label)
    return optimizer


def _plain(parameters: list[Any]) -> Any:
    """Returns an optimizer whose step is the mean of the replicas."""
    import torch

    return torch.optim.SGD(parameters, lr=1.0)


def _check(optimizer: Any, every: int | None, outer: Any) -> None:
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"a torch.optim.Optimizer is needed, not a {type(optimizer).__name__}")
    if hasattr(optimizer, "no_sync"):
        raise ValueError(f"this {type(optimizer).__name__} is wrapped already; make a new one")
    if every is None and outer is not None:
        raise ValueError("outer needs every=: after how many steps it makes one")
    if every is not None and every < 1:
        raise ValueError(f"every is a number of steps, at least 1, not {every}")


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _take_from_first(collectives: "Collectives", tensors: Sequence[Any], label: str) -> None:
    """Makes tensors those of replica 0."""
    import torch

    unique = list({id(tensor): tensor for tensor in tensors}.values())
    if collectives.size == 1:
        return
    first = collectives.broadcast(
        [tensor.detach() for tensor in unique], 0, f"parameters of {label}"
    )
    with torch.no_grad():
        for tensor, value in zip(unique, first, strict=True):
            tensor.copy_(value)


class _Average:
    """Takes the means of an optimizer's gradients."""

    def __init__(
        self,
        collectives: "Collectives",
        optimizer: Any,
        overlap: bool,
        bucket_bytes: int,
        label: str,
    ) -> None:
        self._collectives = collectives
        self._optimizer = optimizer
        self._overlap = overlap
        self._bucket_bytes = bucket_bytes
        self._label = label
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._launched = 0  # how many buckets, in this pass
        self._in_pass = False
        self._is_mean = False  # all gradients are, now
        self._is_used = False  # `step` has used them, and nobody has cleared them
        self._paused = 0
        #: This, and those in whose buckets some of its parameters are.
        self._together = [self]
        self._add_new()
        # Kept though the user drops the optimizer: when it is collected differs from replica to
        # replica, and what is averaged must not.
        collectives.averages.append(self)
        self._change_optimizer()

    def _change_optimizer(self) -> None:
        optimizer = self._optimizer
        self._zero_grad, self._add_param_group = optimizer.zero_grad, optimizer.add_param_group
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.zero_grad = self.zero_grad
        optimizer.add_param_group = self.add_param_group
        optimizer.synchronize = self.synchronize
        optimizer.no_sync = self.no_sync

    # What users call.

    def synchronize(self) -> None:
        """Takes the means, if they are not taken yet."""
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
        """Clears the gradients; takes what that of the optimizer does."""
        for each in self._together:
            each._abandon_pass()
            each._is_used = each._is_mean = False
        self._zero_grad(*args, **kwargs)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Adds parameters, which become those of replica 0."""
        self._add_param_group(group)
        added = self._optimizer.param_groups[-1]["params"]
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
            each._is_used = True

    def _on_gradient(self, parameter: Any) -> None:
        """A backward pass has added to a gradient."""
        bucket, index = self._places[id(parameter)]
        if self._is_used and parameter.grad is bucket.gradients[index]:
            return
        self._is_used = self._is_mean = False
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
        bucket.take(index)
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
            bucket.missing = set(range(len(bucket.parameters)))

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
        number = self._launched
        label = f"gradients of {self._label}, bucket {number}"
        self._buckets[number].launch(label)
        self._launched += 1

    def _abandon_pass(self) -> None:
        """Waits for what was launched in a backward pass that has failed."""
        if self._in_pass:
            self._in_pass = False
            for bucket in self._buckets[: self._launched]:
                bucket.wait()

    def _add_new(self) -> None:
        """Makes buckets for parameters that have none: at the begin, added, or trained only now."""
        if self._collectives.size == 1:
            return
        mine = {id(each): each for each in _parameters(self._optimizer) if each.requires_grad}
        for peer in self._collectives.averages:
            if peer not in self._together and mine.keys() & peer._places.keys():
                self._together.append(peer)
        known = set().union(*[each._places for each in self._together])
        new = [parameter for key, parameter in mine.items() if key not in known]
        for bucket in make_buckets(self._collectives, new, self._bucket_bytes):
            self._buckets.append(bucket)
            self._places |= {
                id(parameter): (bucket, index) for index, parameter in enumerate(bucket.parameters)
            }
        self._listen(new)

    def _listen(self, parameters: Iterable[Any]) -> None:
        # A weak reference: PyTorch keeps hooks where Python does not collect cycles.
        me = weakref.ref(self)

        def on_gradient(parameter: Any) -> None:
            average = me()
            if average is not None:
                average._on_gradient(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(on_gradient)


class _Outer:
    """Takes the mean of parameters after some steps, and makes a step of an outer optimizer."""

    def __init__(
        self,
        collectives: "Collectives",
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
        self._change_optimizer(optimizer)

    def _change_optimizer(self, optimizer: Any) -> None:
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
        """Raises an error."""
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
            self._average()
            self.optimizer.step()
            for shared, parameter in self._pairs():
                parameter.copy_(shared)
        self._steps = 0

    def _average(self) -> None:
        for number, bucket in enumerate(self._buckets):
            bucket.missing = set(range(len(bucket.parameters)))
            bucket.launch(f"outer step of {self._label}, bucket {number}")
        for bucket in self._buckets:
            bucket.finish()

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
    """Returns a copy in which small differences are not lost: in at least 32 bits."""
    import torch

    low = parameter.dtype in (torch.float16, torch.bfloat16)
    return parameter.detach().to(torch.float32 if low else parameter.dtype, copy=True)
