"""Values for many readers: serialised once, and mapped by readers on the same host."""

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from courier.threads.locks import Lock
from courier.values.frozen import AVAILABLE, Frozen
from courier.values.parcel import Parcel, pack, writable_copy

T = TypeVar("T")

#: Smaller buffers are sent inline, and need no memory of their own. Measured: equal between 64 and
#: 256 KiB.
MIN_BYTES = 1 << 18


class Shared(Generic[T]):
    """A value that is serialised once for any number of readers.

    Return it from a method, or pass it as an argument, alone or inside of something else: the
    other side receives the value itself. Readers on the same host map its large arrays without a
    copy; each may write to its own, and no other reader sees that. For other hosts, the bytes are
    sent again, but not serialised again.

    The value is serialised when it is first sent, and stays in memory until the last reference to
    this object is gone; readers' values stay valid. Once it has no reader left, its memory may be
    reused for the next value; a process keeps two such memories for about 15 s. Thread-safe.

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
        self._lock = Lock()
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
        # The pickle as bytes, not as a buffer: the content of buffers is not authenticated.
        return _load, (parcel.pickle, buffers)

    def _packed(self) -> Parcel:
        with self._lock:
            if self._parcel is None:
                self._parcel, self._frozen = freeze(pack(self._value))
            return self._parcel


def freeze(parcel: Parcel, *, maps: bool = AVAILABLE) -> tuple[Parcel, Frozen | None]:
    """Copies a parcel; its large buffers, if `maps`, into memory that readers of this host map.

    Returns the copy, and an object to keep as long as readers may map it.
    """
    views = [memoryview(buffer).cast("B") for buffer in parcel.buffers]
    large = [view for view in views if len(view) >= MIN_BYTES]
    whole: Frozen | None = None
    if large and maps:
        with contextlib.suppress(OSError):
            whole = Frozen(large)
    frozen = iter(whole.views if whole is not None else ())
    buffers: list[memoryview] = []
    for view in views:
        is_large = whole is not None and len(view) >= MIN_BYTES
        copy = next(frozen) if is_large else memoryview(writable_copy(view))
        # Buffers that are read-only here are read-only there; all others are writable.
        buffers.append(copy.toreadonly() if view.readonly else copy)
    return Parcel(bytes(parcel.pickle), buffers), whole


def unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, Shared) else value


def _load(data: Any, buffers: Sequence[Any]) -> Any:
    return pickle.loads(data, buffers=buffers)
