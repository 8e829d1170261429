"""Definitions of scripts, which are pickled by value, with their names in `__main__`."""

import functools
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

#: Names of the script as a module; the second in a child that `multiprocessing` has spawned.
SCRIPT_NAMES = ("__main__", "__mp_main__")


class StandIn(ModuleType):
    """`__main__` of a process that did not run the script."""

    #: Kept, because running code may be from there.
    before: ModuleType


def stand_in() -> StandIn:
    """Makes a new `__main__` for this process, and returns it."""
    main = StandIn("__main__")
    main.before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    # As multiprocessing does, whose children return objects from there.
    sys.modules["__mp_main__"] = main
    return main


def name_in_script(obj: object) -> str | None:
    name = getattr(obj, "__qualname__", None)
    if getattr(obj, "__module__", None) not in SCRIPT_NAMES or not isinstance(name, str):
        return None
    return name if found(sys.modules["__main__"], name) is obj else None


def found(place: object, name: str) -> object:
    return functools.reduce(lambda outer, each: getattr(outer, each, None), name.split("."), place)


def newest_of(name: str, data: bytes) -> object:
    """Returns the script's object of a name; the pickled one if there is none."""
    here = found(sys.modules["__main__"], name)
    return pickle.loads(data) if here is None else here


def set_state_and_keep(
    obj: object, state: "tuple[Callable[[object, object], object] | None, object, str]"
) -> None:
    """Gives an object of the script its state and its place, as the last step of its unpickling."""
    set_state, inner, name = state
    if set_state is not None:
        set_state(obj, inner)
    if isinstance(obj, type):
        obj.__qualname__ = name  # cloudpickle leaves it out
    place: Any = sys.modules["__main__"]
    if not isinstance(place, StandIn):  # it is the script itself
        return
    *outer, last = name.split(".")
    for each in outer:  # classes that may not have come yet
        if not hasattr(place, each):
            setattr(place, each, SimpleNamespace())
        place = getattr(place, each)
    if getattr(place, last, None) is not obj:
        setattr(place, last, obj)
