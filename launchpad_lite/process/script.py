"""The user's script as the `__main__` of processes that did not run it.

Its definitions are pickled by value (`courier.dumps`). A child that `multiprocessing` starts with
`spawn` imports the script by itself, as usual, once it knows its path.
"""

import contextlib
import contextvars
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

import cloudpickle

from courier import lowlevel


class Script(NamedTuple):
    """The script of a process."""

    module: str | None  # name of the module, after `python -m`
    #: Its path. None in a notebook, and after `python -c`.
    file: str | None
    digest: str  # of its content; empty where there is none

    @classmethod
    def here(cls) -> "Script":
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        spec = getattr(main, "__spec__", None)
        module = getattr(spec, "name", None)
        if not file:
            return cls(module, None, "")
        path = Path(file).absolute()
        return cls(module, str(path), _digest(path))

    def stand_in(self) -> None:
        """Makes it the script of this process without running it, if it is found here."""
        main = lowlevel.stand_in()
        if self.module is None:
            if file := self._found_file():
                main.__file__ = file
        elif _is_found(self.module):
            main.__spec__ = ModuleSpec(self.module, None, origin=self.file)
            main.__file__ = self.file

    def _found_file(self) -> str | None:
        """Returns the path of the script here: its own, or in the code that was sent."""
        if self.file is None:
            return None
        path = Path(self.file)
        # Another host may have an older version at this path, and other files of this name.
        for each in (path, *(Path(folder, path.name) for folder in sys.path)):
            if self.digest and _digest(each) == self.digest:
                return str(each)
        return self.file if path.is_file() else None


def carry_by_value() -> None:
    """Pickles definitions of the script by value in spawned children of `multiprocessing`, too.

    There cloudpickle takes it for a module that other processes can import.
    """
    script = sys.modules["__main__"]
    if script.__name__ == "__mp_main__":
        cloudpickle.register_pickle_by_value(script)


def _digest(file: Path) -> str:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


#: The reasons for which the user's code is only imported here.
_importer: contextvars.ContextVar[str | None] = contextvars.ContextVar("importer", default=None)


@contextlib.contextmanager
def importing(who: str) -> Iterator[None]:
    """Refuses launches, in a block, by code that `who` imports for its definitions."""
    token = _importer.set(who)
    try:
        yield
    finally:
        _importer.reset(token)


def importer() -> str | None:
    """Returns who imports the user's code here for definitions; None: it may launch programs."""
    # multiprocessing itself checks this, for the same reason.
    process = lowlevel.loaded_module("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        return "a process that multiprocessing started"
    return _importer.get()
