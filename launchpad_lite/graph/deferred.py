"""Arguments that are made in the node that uses them."""

import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from launchpad_lite.nodes.base import Handle
from launchpad_lite.parts.arguments import name_of

T = TypeVar("T")


class Deferred(Generic[T]):
    """An argument that is constructed in the running node.

    For objects that cannot or should not be pickled: a network, an environment, an open file.
    Handles in its arguments are edges of the graph and become clients, as usual. One that is used
    several times in a node is constructed once there. If the constructor raises, the node fails.

    Example:
        env = lp.Deferred(gym.make, "CartPole-v1")
        program.add_node(lp.CourierNode(Actor, env, learner), label="actor")
    """

    #: The object that was constructed here, and its arguments.
    _made: tuple[tuple[Any, ...], T] | None = None

    def __init__(self, constructor: Callable[..., T], /, *args: Any, **kwargs: Any) -> None:
        """Constructs nothing yet.

        Args:
            constructor: A class, or a function that returns an object.
            *args: Its arguments.
            **kwargs: The same by name.

        Raises:
            TypeError: `constructor` cannot be called.
        """
        if not callable(constructor):
            raise TypeError(
                "Deferred takes a class or function and then its arguments, as in "
                f"Deferred(gym.make, 'CartPole-v1'); {constructor!r} cannot be called"
            )
        self.constructor = constructor
        self.args = args
        self.kwargs = kwargs

    def dereference(self) -> T:
        """Returns the object, which is constructed the first time.

        One with handles in its arguments is constructed each time: they may become clients of
        another launch.
        """
        args = tuple(map(maybe_dereference, self.args))
        kwargs = {name: maybe_dereference(value) for name, value in self.kwargs.items()}
        parts = (*args, *kwargs.values())
        if self._made is None or not all(map(operator.is_, parts, self._made[0])):
            self._made = parts, construct(self.constructor, args, kwargs)
        return self._made[1]

    def __getstate__(self) -> dict[str, Any]:
        # A copy constructs its own, because this object may not be picklable.
        return {name: value for name, value in vars(self).items() if name != "_made"}

    def __repr__(self) -> str:
        return f"Deferred({name_of(self.constructor)})"


def construct(constructor: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Constructs the object; adds a note to errors."""
    try:
        return constructor(*args, **kwargs)
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"in an argument of the node: lp.Deferred({name_of(constructor)})")
        raise


def maybe_dereference(value: Any) -> Any:
    """Returns the client of a handle, the object of a Deferred, and anything else as it is.

    Raises:
        UnresolvedAddressError: A handle, and the program does not run (yet).

    Example:
        def run(learner_or_handle):
            learner = lp.maybe_dereference(learner_or_handle)
    """
    return value.dereference() if isinstance(value, Handle | Deferred) else value
