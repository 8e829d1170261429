"""Values in messages: a pickle and the large buffers beside it.

Pickle protocol 5 hands out the memory of arrays as separate buffers, so a
large array is never copied into a pickle stream. cloudpickle pickles by value what plain pickle
cannot (lambdas, local classes, all of `__main__`). Nothing here knows transports.
"""

import contextlib
import functools
import hashlib
import io
import linecache
import math
import operator
import os
import pickle
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import cloudpickle

from courier.errors import ProtocolError, SerializationError
from courier.values._tensors import tensor_pickler, tensor_reducers
from courier.values.annotations import make_readable
from courier.values.definitions import found, name_in_script, newest_of, set_state_and_keep
from courier.values.texts import said_by, shortened

#: Smaller memory is not used again.
_REUSED_BYTES = 1 << 18

#: Smaller buffers are copied into the pickle, which is cheaper than sending them beside it.
_INSIDE_BYTES = 1 << 15

#: The most buffers beside a pickle; more are copied into it.
MOST_BUFFERS = 2048

WritableBuffer = bytearray | memoryview


@dataclass(slots=True)  # frozen ones take four times as long to make
class Parcel:
    """A pickled value: the pickle and its out-of-band buffers, in order. Never changed."""

    pickle: bytes | bytearray | memoryview
    buffers: Sequence[WritableBuffer] = ()

    @property
    def total_bytes(self) -> int:
        """Size of the pickle and all buffers."""
        return len(self.pickle) + sum(len(buffer) for buffer in self.buffers)

    def __reduce__(self) -> tuple[type["Parcel"], tuple[bytes, list[bytearray]]]:
        # Views cannot be pickled; a parcel in a parcel is rare enough to be copied.
        return Parcel, (bytes(self.pickle), [bytearray(buffer) for buffer in self.buffers])

    def digest(self) -> bytes:
        """SHA-256 of the pickle; the buffers are data, not code, and stay outside."""
        return hashlib.sha256(self.pickle).digest()

    def pieces(self, size_bytes: int) -> Iterator[bytes]:
        """Cuts the pickle and then the buffers into pieces of at most `size_bytes`.

        Small buffers share a piece: many small arrays must not become many messages.
        """
        gathered = bytearray()
        for part in (self.pickle, *self.buffers):
            view = memoryview(part)
            if len(gathered) + len(view) > size_bytes and gathered:
                yield bytes(gathered)
                gathered.clear()
            if len(view) > size_bytes:
                starts = range(0, len(view), size_bytes)
                yield from (bytes(view[start : start + size_bytes]) for start in starts)
            else:
                gathered += view
        if gathered:
            yield bytes(gathered)


NO_PARCEL = Parcel(b"")


def pack(value: Any, most_bytes: float = math.inf) -> Parcel:
    """Pickles a value; raises SerializationError, also if it takes more than `most_bytes`."""
    buffers: list[pickle.PickleBuffer] = []
    # A limit holds for buffers, too, so they are copied.
    choose = _chooser(buffers) if math.isinf(most_bytes) else None
    try:
        if choose is None or (data := _plain(value, choose)) is None:
            buffers.clear()
            with _BoundedMemory() as file:
                file.most_bytes = most_bytes
                Pickler(file, protocol=5, buffer_callback=choose).dump(value)
                data = file.getvalue()
        return Parcel(data, [_raw(buffer) for buffer in buffers]) if buffers else Parcel(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pickling runs code of arbitrary classes: even sys.exit()
        raise _failure(error) from error


def _plain(value: Any, choose: Callable[[pickle.PickleBuffer], bool] | None = None) -> bytes | None:
    """Returns a plain pickle, which is faster; None if another process could not read it."""
    try:
        if (pickler := tensor_pickler()) is None:
            data = pickle.dumps(value, protocol=5, buffer_callback=choose)
        else:
            file = io.BytesIO()
            pickler(file, protocol=5, buffer_callback=choose).dump(value)
            data = file.getvalue()
    except Exception:  # noqa: BLE001 - any object may fail in any way; cloudpickle tries next
        return None
    # A reference to __main__ would mean another module in the other process. `find`, because
    # `in` takes ten times as long: it tries the bytes as a number first.
    return data if data.find(b"__main__") < 0 and not _by_value() else None


class _BoundedMemory(io.BytesIO):
    """Memory for `most_bytes`; `write` raises MemoryError beyond them."""

    most_bytes = math.inf

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self.most_bytes:
            raise MemoryError(f"it takes more than {self.most_bytes:,} bytes")
        return super().write(data)


def _failure(error: BaseException) -> SerializationError:
    return SerializationError(f"{type(error).__name__}: {shortened(said_by(error))}")


def _chooser(outside: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """Returns the callback that tells pickle which buffers to copy, and gathers the others."""

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        try:
            if buffer.raw().nbytes < _INSIDE_BYTES or len(outside) >= MOST_BUFFERS:
                return True
        except BufferError:
            pass
        outside.append(buffer)
        return False

    return stays_inside


def dump(value: Any, file: IO[bytes]) -> None:
    """Writes a pickle of a value that can be an argument of a call.

    Lambdas, and definitions of the script, are in it by value: `pickle.load` reads it in any
    process that has courier.

    Example:
        courier.dump({"policy": lambda state: 0}, file)
    """
    Pickler(file, protocol=5).dump(value)


def dumps(
    value: Any, *, newest: bool = False, buffers: "list[WritableBuffer] | None" = None
) -> bytes:
    """Returns the bytes that `dump` writes.

    Args:
        value: The value.
        buffers: Gets the memory of large arrays and tensors, which is not in the pickle then:
            `pickle.loads(data, buffers=buffers)` reads it.
        newest: Whether the reading process takes functions and classes of the script from its own
            script, by their names. Those that it does not find there are as now.

    Example:
        double = pickle.loads(courier.dumps(lambda x: 2 * x))
    """
    outside: list[pickle.PickleBuffer] = []
    choose = None if buffers is None else _chooser(outside)
    if (data := _plain(value, choose)) is None:
        outside.clear()
        with io.BytesIO() as file:
            (_Newest if newest else Pickler)(file, protocol=5, buffer_callback=choose).dump(value)
            data = file.getvalue()
    if buffers is not None:
        buffers += map(_raw, outside)
    return data


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles values that plain pickle cannot, too.

    Unpickled definitions are found by name. Tracebacks of functions name their files and show their
    lines.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tensors = tensor_reducers()

    def reducer_override(self, obj: Any) -> Any:
        # This runs for each object of a value, and nearly all are neither code nor classes.
        if not issubclass(type(obj), _REDUCED_HERE):
            reduce = self._tensors.get(type(obj))
            return NotImplemented if reduce is None else reduce(obj)
        # cloudpickle would send the unread rest as a StringIO.
        if isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            raise pickle.PicklingError("it is an open file; pass its path and open it in the node")
        # cloudpickle 3.1.3 and later leave out the file of code.
        if isinstance(obj, types.CodeType):
            make, args = self.dispatch_table[types.CodeType](obj)
            numbers = filter(None, map(operator.itemgetter(2), obj.co_lines()))  # these run in C
            shown = slice(obj.co_firstlineno - 1, max(numbers, default=0))
            lines = linecache.getlines(obj.co_filename)[shown]
            return _code, (obj.co_filename, make, args, lines)
        if isinstance(obj, types.FunctionType):
            make_readable(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and not _is_found_by_name(obj):
            parts = obj.__wrapped__, obj.cache_parameters()
            reduced = _cached, parts, None, None, None, None
        # Functions that are pickled by value have six parts.
        if not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        *made, state, items, pairs, set_state = reduced
        if isinstance(obj, types.FunctionType):
            state[1]["_cloudpickle_submodules"] = _submodules(obj.__code__, state[1])
        if (name := name_in_script(obj)) is None:
            return reduced
        return *made, (set_state, state, name), items, pairs, set_state_and_keep


class _Newest(Pickler):
    """Pickles definitions of the script by name, with a copy for scripts that lack them."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and (name := name_in_script(obj)):
            return newest_of, (name, dumps(obj))
        return super().reducer_override(obj)


#: Types that `Pickler` handles itself.
_REDUCED_HERE = (
    type,
    types.FunctionType,
    types.CodeType,
    functools._lru_cache_wrapper,
    io.TextIOWrapper,
)


def _submodules(code: types.CodeType, state: dict[str, Any]) -> list[types.ModuleType]:
    """Returns modules that a function may name; cloudpickle itself does not search nested code."""
    names, needed = names_in(code), list[types.ModuleType]()
    used = list(state["__globals__"].values())
    for cell in state["__closure__"] or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            used.append(cell.cell_contents)
    # Imports inside the function are among its names.
    open_names = {each.__name__ for each in used if isinstance(each, types.ModuleType)} | names
    while open_names:
        packages = [each for each in open_names if hasattr(sys.modules.get(each), "__path__")]
        inner = {f"{package}.{name}" for package in packages for name in names}
        open_names = {name for name in inner if name in sys.modules}
        for module in map(sys.modules.get, sorted(open_names)):
            if type(module) is types.ModuleType:  # those of other types come with their packages
                if module.__spec__ is None:
                    raise pickle.PicklingError(
                        f"its code names {module.__name__}, a module that was made by hand: nodes have none"
                    )
                needed.append(module)
    return needed


def names_in(code: types.CodeType) -> set[str]:
    """Returns the globals and attributes that code names, also in nested code."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def _code(
    file: str, make: Callable[..., types.CodeType], args: tuple[Any, ...], lines: Sequence[str]
) -> types.CodeType:
    code = make(*args).replace(co_filename=file)
    if lines and not os.path.exists(file):  # noqa: PTH110 - Path raises without permission
        first, known = code.co_firstlineno - 1, linecache.getlines(file)
        known += ["\n"] * (first + len(lines) - len(known))
        known[first : first + len(lines)] = lines
        linecache.cache[file] = len(known), None, known, file
    return code


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


#: Returns the modules that the user wants pickled by value, with all that is in them.
_by_value: Callable[[], set[str]] = cloudpickle.list_registry_pickle_by_value


def _is_found_by_name(function: Any) -> bool:
    module = f"{function.__module__}."
    if any(module.startswith(f"{each}.") for each in ("__main__", *_by_value())):
        return False
    return found(sys.modules.get(function.__module__), function.__qualname__) is function


def _raw(buffer: pickle.PickleBuffer) -> memoryview:
    try:
        raw = buffer.raw()
        # A view of a view that a PickleBuffer was made of crashes the collector of Python before
        # 3.11.8 when it finds both in a loop (python/cpython#77894).
        if type(raw.obj) is not memoryview:
            return raw
        return raw.obj.cast("B") if raw.obj.c_contiguous else memoryview(raw.tobytes())
    except BufferError:
        # Neither C nor Fortran contiguous: such a view has no flat memory to show.
        return memoryview(bytes(buffer))


def unpack(parcel: Parcel) -> Any:
    """Rebuilds the value, whose memory may be the buffers. Only for parcels of checked senders."""
    try:
        buffers = parcel.buffers
        return (
            pickle.loads(parcel.pickle, buffers=buffers) if buffers else pickle.loads(parcel.pickle)
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # unpickling runs code of arbitrary classes: even sys.exit()
        raise _failure(error) from error


def unshared(parcel: Parcel) -> Parcel:
    """Returns a parcel whose buffers are copies: the packed value stays its owner's."""
    if not parcel.buffers:
        return parcel
    copies = [writable_copy(memoryview(buffer).cast("B")) for buffer in parcel.buffers]
    return Parcel(parcel.pickle, copies)


def compressed(parcel: Parcel) -> Parcel:
    """Returns a parcel in one compressed piece; `unpack` gives the same value."""
    data = zlib.compress(pickle.dumps(parcel, protocol=5), 1)
    return Parcel(pickle.dumps(MadeWhenLoaded(_decompress, data)))


class MadeWhenLoaded:
    """Becomes what a function returns when it is unpickled."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self._parts = make, args

    def __reduce__(self) -> Any:
        return self._parts


def _decompress(data: bytes) -> Any:
    parcel = pickle.loads(zlib.decompress(data))
    return pickle.loads(parcel.pickle, buffers=parcel.buffers)


def writable_copy(data: bytes | memoryview) -> WritableBuffer:
    copy = allocate(len(data))
    memoryview(copy)[:] = data
    return copy


def allocate(size_bytes: int) -> WritableBuffer:
    """Returns writable memory of this size, with any bytes in it; pages are touched at their use.

    Large memory is used again when its last view is freed: fresh pages take longer than a copy.
    Thread-safe.

    Example:
        array = np.frombuffer(lowlevel.allocate(8 * 100_000), np.float64)
    """
    if size_bytes < _REUSED_BYTES:
        return bytearray(size_bytes)
    from courier.values import reused  # ctypes takes milliseconds to load

    return reused.take(size_bytes)


class ParcelAssembler:
    """Joins a parcel from bytes that come piece by piece, as `Parcel.pieces` cuts them."""

    def __init__(self, pickle_bytes: int, buffer_bytes: Sequence[int], seal_bytes: int = 0) -> None:
        """Begins; a seal may come between the pickle and the buffers."""
        self.pickle: WritableBuffer = bytearray()
        self.seal = bytearray(seal_bytes)
        self.buffers: list[WritableBuffer] = []
        self._open = self._make_parts(pickle_bytes, buffer_bytes)
        #: The memory for the next bytes; None if all have come.
        self.room = next(self._open, None)

    def _make_parts(self, pickle_bytes: int, buffer_bytes: Sequence[int]) -> Iterator[memoryview]:
        """Makes each part when its turn comes, so that announced bytes take no memory."""
        try:
            self.pickle = allocate(pickle_bytes)
            if pickle_bytes:
                yield memoryview(self.pickle)
            if self.seal:
                yield memoryview(self.seal)
            for size in buffer_bytes:
                self.buffers.append(allocate(size))
                if size:
                    yield memoryview(self.buffers[-1])
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            size = pickle_bytes + sum(buffer_bytes)
            raise ProtocolError(
                f"a message of {size:,} bytes does not fit into memory here"
            ) from error

    def filled(self, count: int) -> None:
        assert self.room is not None
        self.room = self.room[count:] if count < len(self.room) else next(self._open, None)

    def take(self, view: memoryview) -> int:
        """Copies bytes; returns how many belong to this parcel."""
        taken = 0
        while taken < len(view) and self.room is not None:
            count = min(len(self.room), len(view) - taken)
            self.room[:count] = view[taken : taken + count]
            taken += count
            self.filled(count)
        return taken

    def add(self, piece: bytes) -> None:
        """Takes the next piece; raises ProtocolError if more bytes come than were announced."""
        if self.take(memoryview(piece)) < len(piece):
            raise ProtocolError("the peer sent more bytes than it had announced")

    def finish(self) -> Parcel:
        if self.room is not None:
            raise ProtocolError("the peer sent fewer bytes than it had announced")
        return Parcel(memoryview(self.pickle), self.buffers)


def can_pickle(value: Any, most_bytes: float = math.inf) -> bool:
    try:
        unpack(pack(value, most_bytes))
    except SerializationError:
        return False
    return True
