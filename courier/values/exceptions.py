"""Exceptions across processes: own type, message and a readable remote traceback."""

import contextlib
import math
import traceback as _traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from courier.errors import RemoteError, SerializationError
from courier.values.parcel import MadeWhenLoaded, Parcel, can_pickle, pack, unpack
from courier.values.texts import MOST_CHARACTERS, said_by, shortened

#: Characters of each exception in a traceback, so that all of a chain have room.
_PART = MOST_CHARACTERS // 4
_UNSAID = "<no message: code of this exception raises, takes too long, or ended the process>"


class RemoteTraceback(Exception):  # noqa: N818 - a text to print, not an error to catch
    """The cause of an exception, which Python prints above it."""

    def __init__(self, text: str, where: str = "the other process") -> None:
        super().__init__(text, where)
        self.text = text
        self.where = where

    def __str__(self) -> str:
        return f"\n\n  --- in {self.where} ---\n{self.text.rstrip()}\n"


@dataclass(frozen=True, slots=True)
class ExceptionReport:
    """An exception in a form that can always be sent. Very long texts in it are cut.

    Attributes:
        type_name: Qualified name of its type.
        message: `str()` of it.
        traceback: As Python prints it, chained causes included.
        parcel: The pickled exception; None where it cannot be pickled.
        causes: Type names of the exceptions that it was raised from, the nearest first.
    """

    type_name: str
    message: str
    traceback: str = field(repr=False)
    parcel: Parcel | None = field(repr=False)
    causes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("type_name", "message", "traceback"):
            object.__setattr__(self, name, shortened(getattr(self, name)))

    def __reduce__(self) -> Any:
        # In the constructor, because no sender is trusted with the length of a text.
        parts = (self.type_name, self.message, self.traceback, self.parcel, self.causes)
        return ExceptionReport, parts

    @classmethod
    def of(cls, error: BaseException, *, skip_frames: int = 0) -> "ExceptionReport":
        """Describes an exception. Never raises, but takes as long as code of the exception takes.

        Args:
            error: The exception.
            skip_frames: Outermost frames to leave out, of the caller's machinery.
        """
        return cls.text_of(error, skip_frames=skip_frames).with_object(error)

    @classmethod
    def bare(cls, error: BaseException, *, skip_frames: int = 0) -> "ExceptionReport":
        """Describes an exception by its type and place, as `of`, but runs none of its code."""
        frames = _traceback.format_tb(_skipped(error, skip_frames))
        last = f"{_name(error)}: {_UNSAID}\n"
        traceback = "".join(["Traceback (most recent call last):\n", *frames, last])
        return cls(_name(error), _UNSAID, traceback, None)

    @classmethod
    def text_of(cls, error: BaseException, *, skip_frames: int = 0) -> "ExceptionReport":
        """Describes an exception, as `of`, without the exception itself."""
        try:
            return cls(
                _name(error),
                said_by(error),
                "".join(_lines(error, _skipped(error, skip_frames))),
                None,
                tuple(_name(cause) for cause in _causes(error)),
            )
        except BaseException:  # noqa: BLE001 - runs its code, which may raise anything
            return cls.bare(error, skip_frames=skip_frames)

    def with_object(self, error: BaseException, most_bytes: float = math.inf) -> "ExceptionReport":
        """Returns the report with the exception itself, if that can be pickled in `most_bytes`."""
        try:
            return replace(self, parcel=_pack_exception(error, most_bytes))
        except BaseException:  # noqa: BLE001 - as above
            return self

    def rebuild(
        self, where: str = "the other process", kind: type[BaseException] = Exception
    ) -> BaseException:
        """Returns the exception as itself, or as `RemoteError` where that is not possible.

        Call it only for reports whose sender has been checked.

        Args:
            where: Where it was raised, for the traceback.
            kind: Types that are returned as themselves: by default only ordinary exceptions,
                because a SystemExit or KeyboardInterrupt of another process must not end this one.
        """
        error: object = None
        if self.parcel is not None:
            with contextlib.suppress(SerializationError):
                error = unpack(self.parcel)
        if not isinstance(error, kind):
            error = RemoteError(self.type_name, self.message)
        error.__cause__ = RemoteTraceback(self.traceback, where)
        return error


def remote_traceback(error: BaseException) -> str | None:
    """Returns the traceback in the other process, or None if `error` was raised here.

    Example:
        try:
            client.step()
        except ValueError as error:
            print(courier.remote_traceback(error))
    """
    cause = error.__cause__
    return cause.text if isinstance(cause, RemoteTraceback) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    # Only the nearest: a loop that retries has many.
    while (cause := error.__cause__) is not None and id(cause) not in seen and len(seen) <= 100:
        yield cause
        seen.add(id(cause))
        error = cause


def _name(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _skipped(error: BaseException, frames: int) -> TracebackType | None:
    tb = error.__traceback__
    for _ in range(frames):
        if tb is not None and tb.tb_next is not None:
            tb = tb.tb_next
    return tb


def _lines(error: BaseException, tb: TracebackType | None) -> Iterator[str]:
    """Yields the text of an exception as Python prints it. Cuts long texts before copying them."""
    whole = _traceback.TracebackException(type(error), error, tb, compact=True)
    left = [whole]
    while left:
        values = vars(each := left.pop())
        values.update({k: shortened(v, _PART) for k, v in values.items() if isinstance(v, str)})
        if isinstance(notes := values.get("__notes__"), list):
            values["__notes__"] = [shortened(said_by(note), _PART) for note in notes]
        left += filter(None, (each.__cause__, each.__context__, *(values.get("exceptions") or ())))
    return whole.format()


def _pack_exception(error: BaseException, most_bytes: float) -> Parcel | None:
    for make in (lambda: error, lambda: _by_its_state(error, most_bytes)):
        try:
            parcel = pack(make(), most_bytes)
            # Many exceptions pickle well and fail to load: their __init__ wants other arguments.
            rebuilt = unpack(Parcel(bytes(parcel.pickle), parcel.buffers))
        except SerializationError:
            continue
        if type(rebuilt).__qualname__ == type(error).__qualname__:
            return parcel
    return None


def _by_its_state(error: BaseException, most_bytes: float) -> MadeWhenLoaded:
    """Returns what becomes the exception without its __init__, from its state."""
    args = error.args if can_pickle(error.args, most_bytes) else (said_by(error),)
    kept = (each for each in vars(error).items() if can_pickle(each[1], most_bytes))
    return MadeWhenLoaded(_rebuild, type(error), args, dict(kept))


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
