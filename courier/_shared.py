"""Values for many readers: serialised once, and mapped by those on the same host."""

import pickle
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from courier import _frozen
from courier._frozen import Frozen
from courier._parcel import Parcel, pack

T = TypeVar("T")

#: Smaller buffers travel inline, and need no memory of their own. Measured: equal between 64 and
#: 256 KiB.
MIN_BYTES = 1 << 18


class Shared(Generic[T]):
    """A value that is serialised once, however many ask for it.

    Return it from a method, or pass it as an argument, alone or inside of something else: the
    other side receives the value itself. Readers on the same host map its large arrays without a
    copy; each may write to its own, and no other reader sees that. Elsewhere the bytes are sent,
    but not made, again.

    The value is taken as it is when it is first sent, and held in memory until the last reference
    to this object is gone; what readers have got stays valid. Then its memory may serve for the next
    value, once it has no reader left; a process keeps two such memories for about 15 s. Thread-safe.

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
        # The pickle as bytes, not as a buffer: the content of buffers is not authenticated.
        return _load, (parcel.pickle, buffers)

    def _packed(self) -> Parcel:
        with self._lock:
            if self._parcel is None:
                self._parcel, self._frozen = freeze(pack(self._value))
            return self._parcel


def freeze(parcel: Parcel) -> tuple[Parcel, Frozen | None]:
    """Copies a parcel into memory that readers of this host map, as far as that is worth it.

    Returns:
        The copy, and what must be held as long as readers shall map it.
    """
    views = [memoryview(buffer).cast("B") for buffer in parcel.buffers]
    large = [view for view in views if len(view) >= MIN_BYTES]
    whole: Frozen | None = None
    if large and _frozen.AVAILABLE:
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
