"""Values for many readers: serialised once, and mapped by those on the same host."""

import fcntl
import mmap
import os
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from courier._parcel import Parcel, pack

T = TypeVar("T")

#: Smaller buffers travel inline, and need no memory of their own. Measured: equal between 64 and
#: 256 KiB.
MIN_BYTES = 1 << 18


class Frozen:
    """Memory without a name that holds buffers and never changes again."""

    __slots__ = ("__weakref__", "descriptor", "size", "views")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Copies buffers, each to the beginning of a page.

        Raises:
            OSError: There is no memory, or no descriptor, left.
        """
        sizes = [-(-len(buffer) // mmap.PAGESIZE) * mmap.PAGESIZE for buffer in buffers]
        self.size = sum(sizes)
        self.descriptor = os.memfd_create("courier-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self.size)
        self.views: list[memoryview] = []
        offset = 0
        for buffer, size in zip(buffers, sizes, strict=True):
            memory = mmap.mmap(self.descriptor, size, offset=offset)
            memory[: len(buffer)] = buffer
            _frozen[id(memory)] = (weakref.ref(self), offset)
            weakref.finalize(memory, _frozen.pop, id(memory))
            self.views.append(memoryview(memory)[: len(buffer)])
            offset += size
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


#: By the memory in which a buffer lies: the whole, and where in it that memory begins.
_frozen: dict[int, tuple["weakref.ref[Frozen]", int]] = {}


def frozen_of(buffer: object) -> tuple[Frozen, int] | None:
    """Returns the frozen memory that a buffer is the beginning of a page of, and the offset."""
    if not _frozen or not isinstance(buffer, memoryview):
        return None
    memory = buffer.obj
    while isinstance(memory, memoryview):
        memory = memory.obj
    found = _frozen.get(id(memory))
    if found is None:
        return None
    whole = found[0]()
    return None if whole is None else (whole, found[1])


class Shared(Generic[T]):
    """A value that is serialised once, however many ask for it.

    Return it from a method, or pass it as an argument, alone or inside of something else: the
    other side receives the value itself. Readers on the same host map its large arrays without a
    copy; each may write to what it got, and nobody else sees that. Elsewhere the bytes are sent,
    but not made, again.

    The value is taken as it is when it is first sent, and held in memory until the last reference
    to this object is gone; what readers have got stays valid. Thread-safe.

    Example:
        class Learner:
            def step(self):
                ...
                self._latest = courier.Shared(self._params)

            def params(self):
                return self._latest
    """

    def __init__(self, value: T) -> None:
        """Wraps a value; serialises nothing yet."""
        self._value = value
        self._lock = threading.Lock()
        self._parcel: Parcel | None = None
        self._frozen: Frozen | None = None

    @property
    def value(self) -> T:
        """The value itself."""
        return self._value

    def __reduce_ex__(self, protocol: Any) -> Any:
        parcel = self._packed()
        if protocol < 5:
            views = [memoryview(buffer) for buffer in parcel.buffers]
            copies = [bytes(view) if view.readonly else bytearray(view) for view in views]
            return _load, (parcel.pickle, copies)
        buffers = [pickle.PickleBuffer(buffer) for buffer in parcel.buffers]
        return _load, (pickle.PickleBuffer(parcel.pickle), buffers)

    def _packed(self) -> Parcel:
        with self._lock:
            if self._parcel is None:
                self._parcel, self._frozen = _freeze(pack(self._value))
            return self._parcel


def _freeze(parcel: Parcel) -> tuple[Parcel, Frozen | None]:
    views = [memoryview(buffer).cast("B") for buffer in parcel.buffers]
    large = [view for view in views if len(view) >= MIN_BYTES]
    whole: Frozen | None = None
    if large and hasattr(os, "memfd_create"):
        try:
            whole = Frozen(large)
        except OSError:
            whole = None
    frozen = iter(whole.views if whole is not None else ())
    buffers: list[memoryview] = []
    for view in views:
        is_large = whole is not None and len(view) >= MIN_BYTES
        copy = next(frozen) if is_large else memoryview(bytearray(view))
        # What was read-only here is read-only there; everything else may be written to.
        buffers.append(copy.toreadonly() if view.readonly else copy)
    return Parcel(bytes(parcel.pickle), buffers), whole


def unwrapped(value: Any) -> Any:
    """Returns the value inside of a Shared, or what is none itself."""
    return value.value if isinstance(value, Shared) else value


def _load(data: Any, buffers: Sequence[Any]) -> Any:
    return pickle.loads(data, buffers=buffers)
