"""Exceptions across processes: own type, message and a readable remote traceback."""

import traceback as _traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from courier._parcel import Parcel, can_pickle, pack, unpack
from courier.errors import RemoteError, SerializationError


class RemoteTraceback(Exception):  # noqa: N818 - a text to print, not an error to catch
    """Printed by Python above the exception that it is the cause of."""

    def __init__(self, text: str, where: str = "the other process") -> None:
        super().__init__(text, where)
        self.text = text
        self.where = where

    def __str__(self) -> str:
        return f"\n\n  --- in {self.where} ---\n{self.text.rstrip()}\n"


@dataclass(frozen=True, slots=True)
class ExceptionReport:
    """An exception in a form that always travels.

    Attributes:
        type_name: Qualified name of its type.
        message: `str()` of it.
        traceback: As Python prints it, chained causes included.
        parcel: The pickled exception; None where it cannot be pickled.
        causes: Type names of what it was raised from, the nearest first.
    """

    type_name: str
    message: str
    traceback: str = field(repr=False)
    parcel: Parcel | None = field(repr=False)
    causes: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, *, skip_frames: int = 0) -> "ExceptionReport":
        """Describes an exception. Never raises.

        Args:
            error: What was raised.
            skip_frames: Outermost frames to leave out: those of the caller's machinery.
        """
        try:
            return cls._of(error, skip_frames)
        except BaseException:  # noqa: BLE001 - to look at it runs its code, which may raise anything
            return cls(_name(error), "<it raises when one looks at it>", "", None)

    @classmethod
    def _of(cls, error: BaseException, skip_frames: int) -> "ExceptionReport":
        tb = error.__traceback__
        for _ in range(skip_frames):
            if tb is not None and tb.tb_next is not None:
                tb = tb.tb_next
        lines = _traceback.format_exception(type(error), error, tb)
        return cls(
            _name(error),
            _safe_str(error),
            "".join(lines),
            _pack_exception(error),
            tuple(_name(cause) for cause in _causes(error)),
        )

    def rebuild(self, where: str = "the other process") -> BaseException:
        """Returns the exception as itself, or as `RemoteError` where that is not possible.

        Only ordinary exceptions come back as themselves: a SystemExit or
        KeyboardInterrupt of another process must not end this one.
        Call it only for reports whose sender has been checked.

        Args:
            where: Where it was raised, for the traceback.
        """
        error = self._unpack()
        if error is None:
            error = RemoteError(self.type_name, self.message)
        error.__cause__ = RemoteTraceback(self.traceback, where)
        return error

    def _unpack(self) -> Exception | None:
        if self.parcel is None:
            return None
        try:
            error = unpack(self.parcel)
        except SerializationError:
            return None
        return error if isinstance(error, Exception) else None


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
    while (cause := error.__cause__) is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        error = cause


def _name(error: BaseException) -> str:
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the failure
        return "<its __str__ failed>"


def _pack_exception(error: BaseException) -> Parcel | None:
    if not isinstance(error, Exception):
        return None
    for candidate in (error, _Parts.of(error)):
        try:
            parcel = pack(candidate)
            # Many exceptions pickle well and fail to load: their __init__ wants other arguments.
            rebuilt = unpack(Parcel(bytes(parcel.pickle), parcel.buffers))
        except SerializationError:
            continue
        if type(rebuilt).__qualname__ == type(error).__qualname__:
            return parcel
    return None


class _Parts(NamedTuple):
    """Rebuilds an exception without its __init__, from what pickles of it."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> "_Parts":
        args = error.args if can_pickle(error.args) else (_safe_str(error),)
        state = {name: value for name, value in vars(error).items() if can_pickle(value)}
        return cls(type(error), args, state)

    def __reduce__(self) -> Any:
        return _rebuild, (self.kind, self.args, self.state)


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
