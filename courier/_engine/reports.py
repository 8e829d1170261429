"""How an answer lies in a frame: what a dispatcher gave, and what a lane wants."""

import pickle

from courier import _dispatch as outcomes
from courier._dispatch import Answer
from courier._engine.frames import Frame, Kind
from courier._exceptions import ExceptionReport
from courier._lane import Raised, Refused, Returned, cannot_send, cannot_unpickle
from courier._parcel import Parcel
from courier.errors import ProtocolError, UnknownMethodError

#: Longer texts of exceptions are cut; the exception itself travels whole.
_TEXT_CHARACTERS = 1 << 20


def describe(outcome: Answer | outcomes.End) -> tuple[Kind, Parcel]:
    """Returns the kind of a frame, and what is in it."""
    if isinstance(outcome, outcomes.Value):
        return Kind.VALUE, outcome.parcel
    if isinstance(outcome, outcomes.Failure):
        return Kind.FAILURE, _pack_report(outcome.report)
    if isinstance(outcome, outcomes.Items):
        return Kind.GENERATOR, Parcel(b"")
    if isinstance(outcome, outcomes.End):
        return Kind.END, Parcel(b"")
    if isinstance(outcome, outcomes.Unpicklable):
        return Kind.UNPICKLABLE, text(outcome.text)
    if isinstance(outcome, outcomes.BadArguments):
        return Kind.BAD_ARGUMENTS, text(outcome.text)
    return Kind.UNKNOWN_METHOD, text(outcome.text)


def text(message: str) -> Parcel:
    """Returns a text as the content of a frame."""
    return Parcel(shortened(message).encode("utf-8", "replace"))


def shortened(message: str) -> str:
    """Cuts a text in its middle if it is very long."""
    if len(message) <= _TEXT_CHARACTERS:
        return message
    # Both ends: a message begins with what is wrong, a traceback ends with it.
    half = _TEXT_CHARACTERS // 2
    return f"{message[:half]} ... {message[-half:]}"


def _pack_report(report: ExceptionReport) -> Parcel:
    pickled = report.parcel
    head = (
        report.type_name,
        shortened(report.message),
        shortened(report.traceback),
        report.causes,
        None if pickled is None else bytes(pickled.pickle),
    )
    return Parcel(pickle.dumps(head, protocol=5), () if pickled is None else pickled.buffers)


def read(frame: Frame) -> Returned | Raised | Refused:
    """Reads an answer that has come from a proven server.

    Raises:
        ProtocolError: It is none.
    """
    kind = frame.kind
    if kind == Kind.VALUE:
        return Returned(frame.parcel)
    if kind == Kind.FAILURE:
        return Raised(_read_report(frame.parcel))
    message = bytes(frame.parcel.pickle).decode("utf-8", "replace")
    if kind == Kind.UNKNOWN_METHOD:
        return Refused(UnknownMethodError, message)
    if kind == Kind.UNPICKLABLE:
        return cannot_send(message)
    if kind == Kind.BAD_ARGUMENTS:
        return cannot_unpickle(message)
    raise ProtocolError(f"an answer of unknown kind {kind}")


def _read_report(parcel: Parcel) -> ExceptionReport:
    try:
        type_name, message, traceback, causes, data = pickle.loads(parcel.pickle)
    except Exception as error:
        raise ProtocolError("the report of an exception cannot be read") from error
    pickled = Parcel(data, parcel.buffers) if data is not None else None
    return ExceptionReport(type_name, message, traceback, pickled, causes)
