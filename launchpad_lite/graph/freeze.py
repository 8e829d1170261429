"""The work of a worker, pickled for sending, with handles taken out.

One mechanism collects the handles of a node and puts clients in their places:
the pickler hands out each handle it meets, wherever it is nested, and the
unpickler gets a client for it. So clients appear in dataclasses, sets,
partials and closures just as in lists.
"""

import collections
import contextlib
import functools
import io
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from courier.lowlevel import SCRIPT_NAMES, Pickler, loaded_module, names_in
from launchpad_lite.graph.deferred import Deferred, construct
from launchpad_lite.graph.program import Program
from launchpad_lite.nodes.base import Handle, Node, Work


class UnfreezableError(Exception):
    """Something in a node cannot be pickled. Tells all of that, and the handles in the node."""

    def __init__(self, mistakes: Sequence[str], handles: Sequence[Handle[Any]]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = tuple(mistakes)
        self.handles = tuple(handles)


class LeftBehind:
    """Replaces a program or node to which code refers, in a process where there is none."""

    _what = ""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self._what} has no {name!r} here: programs and their nodes stay where they are built, and "
            "nodes that run have none. Pass what is needed, such as a handle, which add_node() returns"
        )


class FrozenWork(NamedTuple):
    """A node's work, pickled, with the handles in it. It can be sent if nothing is shared.

    `shared` are objects that workers in the same process use as they are, without a copy.
    """

    data: bytes
    handles: tuple[Handle[Any], ...]
    shared: tuple[object, ...] = ()

    def thaw(self) -> Work:
        """Returns the work, with a client in place of each handle."""
        work: Work = _Thawer(self).load()
        return work

    def __reduce__(self) -> "tuple[Callable[..., FrozenWork], tuple[object, ...]]":
        buffer = io.BytesIO()
        _HandlePickler(buffer, protocol=5).dump(self.handles)
        return _load_frozen, (self.data, buffer.getvalue(), self.shared)


class _HandlePickler(Pickler):
    """Pickles handles as handles in a block; elsewhere they become clients in running programs."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Handle):
            return object.__reduce_ex__(obj, 2)
        return super().reducer_override(obj)


def _load_frozen(data: bytes, handles: bytes, shared: tuple[object, ...]) -> FrozenWork:
    return FrozenWork(data, pickle.loads(handles), shared)


def freeze(work: Work, *, share: bool = False, bare: dict[int, object] | None = None) -> FrozenWork:
    """Pickles work, or raises an UnfreezableError.

    `share` shares objects without handles instead of copying them. `bare` are those that are known
    to be without, by id, which several works may hold; it is added to.
    """
    buffer = io.BytesIO()
    bare = {} if bare is None else bare
    freezer = _Freezer(buffer, share, bare)
    error: Exception | None = None
    try:
        freezer.dump(work)
    except Exception as raised:  # noqa: BLE001 - pickling runs code of arbitrary classes
        error = raised
    is_wrong = error is not None or freezer.met_nodes
    if is_wrong and (mistakes := _explain(work, error, share, bare)):
        found = [obj for part in work.parts().values() for _, obj in _walk(part)]
        held = [obj for obj in found if isinstance(obj, Handle)]
        raise UnfreezableError(mistakes, held) from error
    handles = tuple(handle for _, handle in freezer.handles.values())
    shared = tuple(obj for _, obj in freezer.shared.values())
    return FrozenWork(buffer.getvalue(), handles, shared)


class _Freezer(Pickler):
    def __init__(self, buffer: io.BytesIO, share: bool, bare: dict[int, object]) -> None:
        super().__init__(buffer, protocol=5)
        self._share = share
        #: By id, which stays theirs because they are kept: how many were met before, and the object.
        self.handles: dict[int, tuple[int, Any]] = {}
        self.shared: dict[int, tuple[int, Any]] = {}
        self.met_nodes = False
        self._bare = bare
        self._absl = loaded_module("absl.flags")

    def persistent_id(self, obj: Any) -> int | None:
        # A number, because the parts of a larger object would come back here.
        if type(obj) in _SCALARS:
            return None
        if isinstance(obj, Handle):
            return -1 - self.handles.setdefault(id(obj), (len(self.handles), obj))[0]
        if self._share and not _holds_handle(obj, self._bare):
            return self.shared.setdefault(id(obj), (len(self.shared), obj))[0]
        return None

    def reducer_override(self, obj: Any) -> Any:
        # absl's registry of flags is one per process and refuses to be pickled; a program whose
        # classes stand in the script that defines flags meets it as a global.
        if self._absl is not None and obj is self._absl.FLAGS:
            return _this_process_flags, ()
        if isinstance(obj, Deferred):
            # Unpickling constructs the object, with clients in place of handles in its arguments.
            return construct, (obj.constructor, obj.args, obj.kwargs)
        if isinstance(obj, Node):
            self.met_nodes = True
            return LeftBehind, (obj.description,)
        if isinstance(obj, Program):
            return LeftBehind, (f"program {obj.name!r}",)
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


def _this_process_flags() -> Any:
    from absl import flags

    return flags.FLAGS


def _holds_handle(root: object, bare: dict[int, object]) -> bool:
    """Returns whether an object contains a handle or a Deferred, at any depth; else adds to `bare`."""
    seen: dict[int, object] = {}  # kept alive, so that an id stays theirs
    open_objects = [root]
    while open_objects:
        obj = open_objects.pop()
        if id(obj) in seen or id(obj) in bare:
            continue
        seen[id(obj)] = obj
        if isinstance(obj, Handle | Node | Deferred | Program):
            return True
        open_objects.extend(child for _, child in _children(obj) if type(child) not in _SCALARS)
    bare.update(seen)
    return False


#: No object of these types, which are most of what a config consists of, can hold anything.
_SCALARS = frozenset((str, int, float, complex, bool, type(None)))
_ATOMS = (str, int, float, complex, bytes, bytearray, type(None), type, types.ModuleType)
#: The step from an object to a part of it: a template, and its values.
_Step = tuple[str, object]


def _children(obj: object) -> Iterator[tuple[_Step, object]]:
    """Yields the parts of an object, with the step to each. Runs no user code."""
    if isinstance(obj, _ATOMS):
        return
    if isinstance(obj, dict):
        for key, value in list(dict.items(obj)):
            yield ("[{!r}]", key), value
            yield (" key {!r}", key), key
    elif isinstance(obj, list | tuple | set | frozenset | collections.deque):
        for index, value in enumerate(list(obj)):
            yield ("[{}]", index), value
    elif isinstance(obj, types.MethodType):
        for name in ("__self__", "__func__"):
            yield (".{}", name), getattr(obj, name)
    elif isinstance(obj, types.FunctionType):
        yield from _parts_of_function(obj)
    elif isinstance(obj, types.CellType):
        yield from _content_of_cell(obj)
    elif isinstance(obj, functools.partial):
        for name in ("func", "args", "keywords"):
            yield (".{}", name), getattr(obj, name)
    # Without numpy loaded, there are no arrays.
    elif (numpy := loaded_module("numpy")) is not None and isinstance(obj, numpy.ndarray):
        if obj.dtype.hasobject:
            yield (".{}", "flat"), list(obj.flat)
    yield from _attributes(obj)


def _attributes(obj: object) -> Iterator[tuple[_Step, object]]:
    state = getattr(obj, "__dict__", None)
    if isinstance(state, dict):
        for name, value in list(state.items()):
            yield (".{}", name), value
    for kind in type(obj).__mro__:
        if "__slots__" not in kind.__dict__:
            continue
        # Instead of the names in `__slots__`, of which private ones are mangled.
        for name, member in list(kind.__dict__.items()):
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield (".{}", name), member.__get__(obj, type(obj))
                except AttributeError:  # not assigned
                    continue


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[_Step, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        for _, content in _content_of_cell(cell):
            yield (" closure variable {!r}", name), content
    yield (".{}", "__defaults__"), function.__defaults__
    yield (".{}", "__kwdefaults__"), function.__kwdefaults__
    if function.__module__ in SCRIPT_NAMES or "<" in function.__qualname__:
        # Functions of the script and local ones are pickled by value, with the globals they use.
        for name in sorted(names_in(function.__code__)):
            if name in function.__globals__:
                yield (" global {!r}", name), function.__globals__[name]


def _content_of_cell(cell: types.CellType) -> Iterator[tuple[_Step, object]]:
    # The pickler sees the cells of a function that is pickled by value.
    with contextlib.suppress(ValueError):  # not assigned yet
        yield (".{}", "cell_contents"), cell.cell_contents


def _walk(root: object, *, code: bool = True) -> Iterator[tuple[list[_Step], object]]:
    """Yields an object and all in it, code optional, nearest first, with the way to each."""
    seen: dict[int, object] = {id(root): root}
    found = collections.deque[tuple[list[_Step], object]]([([], root)])
    while found:
        path, obj = found.popleft()
        yield path, obj
        if isinstance(obj, Handle | Node | Program) or (not code and callable(obj)):
            continue
        for step, child in _children(obj):
            if type(child) not in _SCALARS and id(child) not in seen:
                seen[id(child)] = child
                found.append(([*path, step], child))


def _spell(path: Sequence[_Step]) -> str:
    return "".join(template.format(what) for template, what in path)


def locate(work: Work, target: object) -> str:
    """Returns the place of an object in a node's work; a vague one if it is not found."""
    for name, part in work.parts().items():
        for path, obj in _walk(part):
            if obj is target:
                return f"{name}{_spell(path)}"
    return "one of its arguments"


def _explain(
    work: Work, error: Exception | None, share: bool, bare: dict[int, object]
) -> list[str]:
    """Finds the smallest unpicklable object in each part; and nodes in arguments."""

    def problem(obj: object) -> Exception | None:
        try:
            _Freezer(io.BytesIO(), share, bare).dump(obj)
        except Exception as error:  # noqa: BLE001 - this is the question
            return error
        return None

    mistakes = []
    for name, part in work.parts().items():
        for way, obj in _walk(part, code=False):
            if isinstance(obj, Node):
                mistakes.append(
                    f"{name}{_spell(way)} (a {type(obj).__qualname__}) is a node where a handle should "
                    "be; pass what add_node() or create_handle() returns"
                )
        if error is not None and (failure := problem(part)) is not None:
            path, culprit, cause = _narrow(part, failure, problem)
            mistakes.append(
                f"{name}{path} (a {type(culprit).__qualname__}) cannot be pickled: "
                f"{type(cause).__name__}: {cause}. Make it in the constructor, which runs in the node, "
                "or give its class a __reduce__"
            )
    return mistakes or ([f"{type(error).__name__}: {error}"] if error is not None else [])


def _narrow(
    part: object, failure: Exception, problem: Callable[[object], Exception | None]
) -> tuple[str, object, Exception]:
    path, seen = list[_Step](), set[int]()
    while id(part) not in seen:
        seen.add(id(part))
        for step, child in _children(part):
            if id(child) not in seen and (deeper := problem(child)) is not None:
                path, part, failure = [*path, step], child, deeper
                break
    return _spell(path), part, failure
