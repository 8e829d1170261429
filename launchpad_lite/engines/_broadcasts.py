"""Values that are sent to each worker once, however many tasks use them."""

import contextvars
import pickle
import uuid
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import courier
from launchpad_lite.engines.errors import EngineError

T = TypeVar("T")

#: The values to which the pickle that is being made refers.
_referred: "contextvars.ContextVar[dict[str, Broadcast[Any]]]" = contextvars.ContextVar("referred")
#: The values that came before the pickle that is being read.
_received: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("received")


class Broadcast(Generic[T]):
    """A value for functions of a pipeline, sent to each worker once: `MapReduce.broadcast` makes it.

    Attributes:
        value: The value.

    Example:
        stop_words = mr.broadcast({"a", "the"})
        words.filter(lambda word: word not in stop_words.value)
    """

    def __init__(self, value: T, name: str = "") -> None:
        self.value = value
        self.name = name or uuid.uuid4().hex

    def __reduce__(self) -> Any:
        try:
            _referred.get()[self.name] = self
        except LookupError:
            raise EngineError(
                "a Broadcast can only be used in the functions of a pipeline"
            ) from None
        return _find, (self.name,)


def _find(name: str) -> "Broadcast[Any]":
    return Broadcast(_received.get()[name], name)


def dump(value: object) -> tuple[bytes, "dict[str, Broadcast[Any]]"]:
    """Returns a pickle, and the values that have to be there when it is loaded."""
    referred: dict[str, Broadcast[Any]] = {}
    token = _referred.set(referred)
    try:
        return courier.dumps(value), referred
    finally:
        _referred.reset(token)


def load(data: bytes, received: Mapping[str, Any]) -> Any:
    """Returns the object of a pickle, given the values that came before it."""
    token = _received.set(received)
    try:
        return pickle.loads(data)
    finally:
        _received.reset(token)
