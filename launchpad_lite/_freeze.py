"""Work on its way into a worker: pickled, with handles taken out.

One mechanism collects the handles of a node and puts clients in their places:
the pickler hands out each handle it meets, wherever it is nested, and the
unpickler gets a client for it. So clients appear in dataclasses, sets,
partials and closures just as in lists.
"""

import collections
import io
import pickle
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
from absl import flags

from launchpad_lite.nodes.base import Handle, Node, Work


class UnfreezableError(Exception):
    """Something in a node cannot be pickled; the text says what and where."""


@dataclass(frozen=True)
class FrozenWork:
    """A node's work that can travel, as long as nothing is shared.

    Attributes:
        data: The pickle.
        handles: The handles in it, by position.
        shared: Objects that are not copied but used by the worker as they are; only for workers
            in the same process.
    """

    data: bytes
    handles: tuple[Handle[Any], ...]
    shared: tuple[object, ...] = ()

    def thaw(self) -> Work:
        """Returns the work, with a client in the place of each handle.

        Raises:
            Exception: Whatever loading the user's classes raises.
        """
        work: Work = _Thawer(self).load()
        return work


def freeze(work: Work, *, share: bool = False) -> FrozenWork:
    """Pickles work.

    Args:
        work: What a worker is to do.
        share: Share what holds no handle instead of copying it.

    Raises:
        UnfreezableError: Something in it cannot be pickled.
    """
    buffer = io.BytesIO()
    freezer = _Freezer(buffer, share)
    try:
        freezer.dump(work)
    except UnfreezableError:
        raise
    except Exception as error:  # pickling runs code of arbitrary classes
        raise UnfreezableError(_explain(work, error)) from error
    handles, shared = freezer.handles.objects, freezer.shared.objects
    return FrozenWork(buffer.getvalue(), tuple(handles), tuple(shared))


class _Freezer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, buffer: io.BytesIO, share: bool) -> None:
        super().__init__(buffer, protocol=5)
        self._share = share
        self.handles = _Collection()
        self.shared = _Collection()
        self._search = _HandleSearch()

    def persistent_id(self, obj: Any) -> int | None:
        # A number, as the parts of anything larger would come back here.
        if isinstance(obj, Handle):
            return -1 - self.handles.position(obj)
        if isinstance(obj, Node):
            raise UnfreezableError(
                "it holds a node where a handle should be; pass what add_node() or "
                "create_handle() returns"
            )
        if self._share and not self._search.holds_handle(obj):
            return self.shared.position(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        # absl's registry of flags is one per process and refuses to be pickled; a program whose
        # classes stand in the script that defines flags meets it as a global.
        if obj is flags.FLAGS:
            return _this_process_flags, ()
        return super().reducer_override(obj)


class _Thawer(pickle.Unpickler):
    def __init__(self, frozen: FrozenWork) -> None:
        super().__init__(io.BytesIO(frozen.data))
        self._frozen = frozen
        self._clients: dict[int, object] = {}

    def persistent_load(self, pid: int) -> object:
        if pid >= 0:
            return self._frozen.shared[pid]
        position = -1 - pid
        if position not in self._clients:
            self._clients[position] = self._frozen.handles[position].dereference()
        return self._clients[position]


def _this_process_flags() -> flags.FlagValues:
    return flags.FLAGS


class _Collection:
    """Objects in the order in which they were first met; keeps them alive, so ids stay theirs."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._positions: dict[int, int] = {}

    def position(self, obj: object) -> int:
        if id(obj) not in self._positions:
            self._positions[id(obj)] = len(self.objects)
            self.objects.append(obj)
        return self._positions[id(obj)]


class _HandleSearch:
    """Tells which objects hold a handle, however deep."""

    def __init__(self) -> None:
        #: Objects known to hold none; kept alive, so that an id stays theirs.
        self._without: dict[int, object] = {}

    def holds_handle(self, root: object) -> bool:
        seen: dict[int, object] = {}
        open_objects = [root]
        while open_objects:
            obj = open_objects.pop()
            if id(obj) in seen or id(obj) in self._without:
                continue
            seen[id(obj)] = obj
            if isinstance(obj, Handle | Node):
                return True
            open_objects.extend(child for _, child in children(obj))
        self._without.update(seen)
        return False


_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


def children(obj: object) -> Iterator[tuple[str, object]]:
    """Yields what an object consists of, with the step that leads there from it."""
    if isinstance(obj, _ATOMS):
        return
    if isinstance(obj, Mapping):
        for key, value in list(obj.items()):
            yield f"[{key!r}]", value
            yield f" key {key!r}", key
    elif isinstance(obj, list | tuple | set | frozenset | collections.deque):
        for index, value in enumerate(list(obj)):
            yield f"[{index}]", value
    if isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, types.FunctionType):
        yield from _parts_of_function(obj)
    elif hasattr(obj, "func") and hasattr(obj, "keywords"):  # functools.partial
        yield ".func", obj.func
        yield ".args", getattr(obj, "args", ())
        yield ".keywords", obj.keywords
    yield from _attributes(obj)


def _attributes(obj: object) -> Iterator[tuple[str, object]]:
    state = getattr(obj, "__dict__", None)
    if isinstance(state, dict):
        for name, value in list(state.items()):
            yield f".{name}", value
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield f".{name}", getattr(obj, name)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" closure variable {name!r}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    if function.__module__ == "__main__":
        # These travel by value, with the globals they use.
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield f" global {name!r}", function.__globals__[name]


def _explain(work: Work, error: Exception) -> str:
    """Finds the smallest part that cannot be pickled and says where it is."""
    for name, part in work.parts().items():
        if (problem := _problem(part)) is not None:
            path, culprit, cause = _narrow(part, problem)
            where = f"{name}{path}" if path else name
            return (
                f"{where} (a {type(culprit).__qualname__}) cannot be pickled: "
                f"{type(cause).__name__}: {cause}. Make it in the constructor, which runs in "
                "the node, or give its class a __reduce__"
            )
    return f"{type(error).__name__}: {error}"


def _narrow(part: object, problem: Exception) -> tuple[str, object, Exception]:
    path, seen = "", set[int]()
    while id(part) not in seen:
        seen.add(id(part))
        for step, child in children(part):
            if id(child) not in seen and (deeper := _problem(child)) is not None:
                path, part, problem = path + step, child, deeper
                break
    return path, part, problem


def _problem(part: object) -> Exception | None:
    try:
        _Freezer(io.BytesIO(), share=False).dump(part)
    except Exception as error:  # noqa: BLE001 - this is the question
        return error
    return None
