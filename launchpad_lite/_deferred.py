"""Arguments that are made in the node that uses them."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from launchpad_lite.nodes.base import Handle, name_of

T = TypeVar("T")

_MISSING = object()


class Deferred(Generic[T]):
    """Stands for an object that is constructed in the running node, where it is an argument.

    For what cannot be pickled, or should not be: a network, an environment, an open file. Handles
    in its arguments are edges of the graph and become clients, as anywhere else. One that is used
    several times in a node is constructed once there. What the constructor raises is the failure of
    the node.

    Example:
        env = lp.Deferred(gym.make, "CartPole-v1")
        program.add_node(lp.CourierNode(Actor, env, learner), label="actor")
    """

    #: What was constructed, here.
    _made: object = _MISSING

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

        Raises:
            Exception: Whatever the constructor raises.
        """
        if self._made is _MISSING:
            args = tuple(map(maybe_dereference, self.args))
            kwargs = {name: maybe_dereference(value) for name, value in self.kwargs.items()}
            self._made = construct(self.constructor, args, kwargs)
        return cast("T", self._made)

    def __getstate__(self) -> dict[str, Any]:
        # A copy constructs its own: this one may be what cannot be pickled.
        return {name: value for name, value in vars(self).items() if name != "_made"}

    def __repr__(self) -> str:
        return f"Deferred({name_of(self.constructor)})"


def construct(constructor: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Constructs what was deferred; an error says so."""
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
