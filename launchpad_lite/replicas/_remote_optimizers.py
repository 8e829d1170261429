"""Optimizers whose parameters are on servers: the part in a replica, and that on the servers.

A replica reads the values, and sends gradients. A server applies these with the optimizer itself, so
that momentum and the like are on the servers. Nothing here communicates.
"""

import abc
import collections
import contextlib
import copy
import dataclasses
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import courier
from launchpad_lite.launching import loaded_module
from launchpad_lite.parts import nests
from launchpad_lite.replicas._carrier import Array
from launchpad_lite.replicas._packing import as_numpy, like
from launchpad_lite.replicas.errors import ReplicaError


class OptimizerStep(NamedTuple):
    """A step of an optimizer: gradients of the parameters in order, and its settings then."""

    gradients: "Sequence[Array | None]"
    settings: Any


class Update(NamedTuple):
    """What a replica sends after a step of its own.

    `version` is that of the values from which it was computed. The steps are those that `step_fn`
    made, mostly one.
    """

    version: int
    steps: Sequence[OptimizerStep]


class Seen(NamedTuple):
    """Parameters, as a replica sees them. The arrays never change.

    `version` is how often they were updated, and `staleness` how many updates came between reading
    and updating: how often.
    """

    arrays: Sequence[Array]
    version: int
    staleness: "collections.Counter[int]"

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclasses.dataclass(frozen=True)
class ParameterPart:
    """Parameters on a server. It is replaced, never changed: others may be reading it."""

    optimizer: "TorchServer | FunctionalServer"
    version: int = 0
    staleness: "collections.Counter[int]" = dataclasses.field(default_factory=collections.Counter)

    def seen(self) -> Seen:
        return Seen(self.optimizer.arrays(), self.version, self.staleness)

    def updated(self, update: Update) -> "ParameterPart":
        optimizer = self.optimizer.copy()
        for step in update.steps:
            optimizer.step(step)
        # A server that was started again may have an older version than a replica.
        stale = max(0, self.version - update.version)
        return ParameterPart(
            optimizer, self.version + 1, self.staleness + collections.Counter([stale])
        )


class RemoteOptimizer(abc.ABC):
    """An optimizer of a replica, whose parameters are on servers. Not thread-safe."""

    def __init__(self, name: str, parts: Mapping[int, Sequence[Any]]) -> None:
        self._name = name
        self._parts = parts
        self._seen: dict[int, Seen] = {}
        #: Steps since the last read, by key.
        self._steps: dict[int, list[OptimizerStep]] = {key: [] for key in parts}
        self.keys = list(parts)

    @property
    def staleness(self) -> "collections.Counter[int]":
        return sum((seen.staleness for seen in self._seen.values()), collections.Counter())

    def leaves(self) -> Iterator[Any]:
        for part in self._parts.values():
            yield from part

    @abc.abstractmethod
    def first(self, key: int) -> ParameterPart:
        """Returns the first value of a key: a copy of what is here."""

    @abc.abstractmethod
    def _load(self, key: int, arrays: Sequence[Array]) -> None: ...

    def load(self, key: int, seen: Seen) -> None:
        """Takes over the values of a server; ReplicaError: it has other parameters."""
        here = [tuple(leaf.shape) for leaf in self._parts[key]]
        there = [array.shape for array in seen.arrays]
        if here != there:
            raise ReplicaError(
                f"{self._name} has other parameters on the servers: of shapes {_text(there)}, not "
                f"{_text(here)}; every replica makes the same model, and a checkpoint is of it"
            )
        self._load(key, seen.arrays)
        self._seen[key] = seen
        self._steps[key] = []

    def updates(self) -> dict[int, Update]:
        """Returns the steps since the last read, by key."""
        return {
            key: Update(self._seen[key].version, steps)
            for key, steps in self._steps.items()
            if steps
        }


def _text(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes[:8])) + (f", .. ({len(shapes)})" if len(shapes) > 8 else "")


def remote(optimizer: Any, parameters: Any, index: int, servers: int) -> "RemoteOptimizer":
    """Returns the replacement of an optimizer, which counts as number `index` in its replica.

    It is of PyTorch; or it has `init(parameters)` and `update(gradients, state, parameters)`, and
    the parameters are given. TypeError: it is neither, or the parameters cannot be changed.
    """
    torch = loaded_module("torch")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        return TorchRemote(optimizer, index, servers)
    name = type(optimizer).__name__
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"wrap_optimizer takes an optimizer of PyTorch, or one with init(parameters) and "
            f"update(gradients, state, parameters), not {name}"
        )
    if not isinstance(parameters, (MutableMapping, MutableSequence)):
        raise TypeError(
            f"wrap_optimizer({name}, parameters): the values of the servers are put into the "
            f"parameters, a dict or list of arrays, not {type(parameters).__name__}"
        )
    return FunctionalRemote(optimizer, parameters, index * servers)


class TorchRemote(RemoteOptimizer):
    """An optimizer of PyTorch. Its parameters are divided among the servers."""

    def __init__(self, optimizer: Any, index: int, servers: int) -> None:
        """Makes `step` keep the gradients; index and servers as for `remote`."""
        self._optimizer = optimizer
        #: By key, the indices of groups, and of parameters in them.
        self._places = {
            index * servers + part: places
            for part, places in enumerate(_divided(optimizer.param_groups, servers))
            if places
        }
        parts = {
            key: [optimizer.param_groups[group]["params"][number] for group, number in places]
            for key, places in self._places.items()
        }
        super().__init__(type(optimizer).__name__, parts)

        def step(_: Any, closure: "Callable[[], Any] | None" = None) -> Any:
            import torch

            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            settings = [_without_parameters(group) for group in optimizer.param_groups]
            for key, parameters in self._parts.items():
                gradients = [_gradient(parameter) for parameter in parameters]
                self._steps[key].append(OptimizerStep(gradients, settings))
            return loss

        optimizer.step = types.MethodType(step, optimizer)
        # As synchronous replicas have them.
        optimizer.synchronize, optimizer.no_sync = lambda: None, contextlib.nullcontext

    def first(self, key: int) -> ParameterPart:
        return ParameterPart(TorchServer(*_cut_out(self._optimizer, self._places[key])))

    def _load(self, key: int, arrays: Sequence[Array]) -> None:
        for parameter, array in zip(self._parts[key], arrays, strict=True):
            if parameter.device.type == "cpu":
                _memory(parameter)[...] = array
            else:  # not yet run on a machine that has one
                parameter.data.copy_(_tensor(array, parameter))


class TorchServer:
    def __init__(self, optimizer: Any, groups: Sequence[int]) -> None:
        """Takes over an optimizer with some of the parameters, and no empty group.

        `groups` has the index in the replicas of each of its groups.
        """
        self._optimizer = optimizer
        self._groups = groups

    def copy(self) -> "TorchServer":
        # Not copy.deepcopy, which takes three times as long for many small parameters.
        places = _places(self._optimizer.param_groups)
        return TorchServer(_cut_out(self._optimizer, places)[0], self._groups)

    def step(self, step: OptimizerStep) -> None:
        for group, number in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(step.settings[number])
        for parameter, gradient in zip(self._parameters(), step.gradients, strict=True):
            parameter.grad = None if gradient is None else _tensor(gradient, parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def arrays(self) -> list[Array]:
        return [_memory(parameter) for parameter in self._parameters()]

    def _parameters(self) -> Iterator[Any]:
        for group in self._optimizer.param_groups:
            yield from group["params"]


def _places(groups: Sequence[Any]) -> list[tuple[int, int]]:
    """Returns the indices of groups, and of parameters in them, of all parameters."""
    return [
        (group, number) for group, its in enumerate(groups) for number in range(len(its["params"]))
    ]


def _divided(groups: Sequence[Any], parts: int) -> list[list[tuple[int, int]]]:
    """Divides parameters into parts with about as many numbers each."""
    places = _places(groups)
    sizes = {(group, number): groups[group]["params"][number].numel() for group, number in places}
    divided: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for place in sorted(places, key=lambda place: -sizes[place]):
        part = loads.index(min(loads))
        divided[part].append(place)
        loads[part] += sizes[place]
    return [sorted(part) for part in divided]


def _cut_out(optimizer: Any, places: Sequence[tuple[int, int]]) -> tuple[Any, list[int]]:
    """Returns a copy of an optimizer with some of its parameters, on the CPU; and its groups."""
    import torch

    def copied(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return value.detach().cpu().clone() if is_tensor else copy.deepcopy(value)

    state = dict(optimizer.__getstate__())
    groups: dict[int, Any] = {}
    states: collections.defaultdict[Any, Any] = collections.defaultdict(dict)
    for group, number in places:
        its = optimizer.param_groups[group]
        parameter = its["params"][number]
        new = copied(parameter).requires_grad_()
        groups.setdefault(group, {**_without_parameters(its), "params": []})["params"].append(new)
        if parameter in optimizer.state:
            its_state = optimizer.state[parameter]
            states[new] = {name: copied(value) for name, value in its_state.items()}
    state.update(param_groups=list(groups.values()), state=states)
    new_optimizer = object.__new__(type(optimizer))
    new_optimizer.__setstate__(state)
    return new_optimizer, list(groups)


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _memory(tensor: Any) -> Array:
    """Returns the memory of a tensor on the CPU as an array, of integers if numpy lacks the type."""
    import torch

    tensor = tensor.detach()
    array: Array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _tensor(array: Array, parameter: Any) -> Any:
    """Returns an array as a tensor of the type of a parameter: the reverse of `_memory`."""
    import torch

    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(parameter.dtype) if parameter.dtype is torch.bfloat16 else tensor


def _gradient(parameter: Any) -> "Array | None":
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    # A copy: the next backward pass may add to it.
    return _memory(gradient.detach().cpu().clone())


class FunctionalRemote(RemoteOptimizer):
    """An optimizer with `init` and `update`, as of optax. One server has all its parameters."""

    def __init__(self, optimizer: Any, parameters: Any, key: int) -> None:
        """Makes it; the parameters get the values of the servers."""
        self._optimizer = optimizer
        self._parameters = parameters
        leaves = [leaf for _, leaf in nests.leaves(parameters)]
        super().__init__(type(optimizer).__name__, {key: [as_numpy(leaf) for leaf in leaves]})

    def init(self, parameters: Any) -> Any:  # noqa: ARG002 - an optimizer has these arguments
        """Returns no state: the servers have it."""
        return ()

    def update(self, gradients: Any, state: Any = (), parameters: Any = None) -> Any:  # noqa: ARG002
        """Keeps gradients for the servers; returns zeros in place of updates, and the state."""
        import numpy as np

        (key,) = self.keys
        arrays = _arrays_like(self._parameters, gradients)
        here = [leaf.shape for leaf in self._parts[key]]
        if here != (given := [array.shape for array in arrays]):
            raise ValueError(
                f"{self._name}: gradients of shapes {_text(given)} for parameters of shapes "
                f"{_text(here)}"
            )
        self._steps[key].append(OptimizerStep([array.copy() for array in arrays], None))
        zeros = nests.rebuilt(gradients, lambda leaf: like(leaf, np.zeros_like(as_numpy(leaf))))
        return zeros, state

    def first(self, key: int) -> ParameterPart:  # noqa: ARG002 - there is one
        parameters = nests.rebuilt(self._parameters, lambda leaf: as_numpy(leaf).copy())
        return ParameterPart(
            FunctionalServer(self._optimizer, parameters, self._optimizer.init(parameters))
        )

    def _load(self, key: int, arrays: Sequence[Array]) -> None:  # noqa: ARG002
        _put(self._parameters, iter(arrays))


def _arrays_like(nest: Any, other: Any) -> list[Array]:
    """Returns the leaves of a nest that has the paths of another one."""
    found, paths = dict(nests.leaves(other)), [path for path, _ in nests.leaves(nest)]
    if list(found) != paths:
        raise ValueError(
            f"gradients and updates are nested as the parameters are: {', '.join(paths)}; not "
            f"{', '.join(found)}"
        )
    return [as_numpy(leaf, path) for path, leaf in found.items()]


def _put(nest: Any, arrays: Iterator[Array]) -> Any:
    """Puts arrays into the dicts, lists and arrays of a nest; returns the nest."""
    if isinstance(nest, (MutableMapping, MutableSequence)):
        keys = sorted(nest, key=repr) if isinstance(nest, MutableMapping) else range(len(nest))
        for key in keys:
            nest[key] = _put(nest[key], arrays)
        return nest
    if nests.children(nest) is not None:  # a tuple, say: it cannot be changed
        return nests.rebuilt(nest, lambda leaf: _put(leaf, arrays))
    array = next(arrays)
    if nests.kind(nest) == "numpy" and nest.shape and nest.flags.writeable:
        nest[...] = array
        return nest
    return like(nest, array.copy())


class FunctionalServer:
    def __init__(self, optimizer: Any, parameters: Any, state: Any) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        # Optimizers of optax are local functions, which plain pickle refuses.
        return {**self.__dict__, "_optimizer": courier.dumps(self._optimizer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _optimizer=pickle.loads(state["_optimizer"]))

    def copy(self) -> "FunctionalServer":
        return FunctionalServer(self._optimizer, self._parameters, self._state)

    def step(self, step: OptimizerStep) -> None:
        import numpy as np

        given = iter(step.gradients)
        gradients = nests.rebuilt(self._parameters, lambda _: next(given))
        updates, self._state = self._optimizer.update(gradients, self._state, self._parameters)
        changes = iter(_arrays_like(self._parameters, updates))
        self._parameters = nests.rebuilt(
            self._parameters, lambda leaf: np.asarray(leaf + next(changes), leaf.dtype)
        )

    def arrays(self) -> list[Array]:
        return [leaf for _, leaf in nests.leaves(self._parameters)]
