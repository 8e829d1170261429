"""How the script has set up `logging`, on its way into workers, which do not run the script."""

import logging
import sys
from collections.abc import Mapping
from typing import NamedTuple

_DEFAULTS = {"": logging.WARNING}


class LoggingSetup(NamedTuple):
    """What `logging.basicConfig` and `Logger.setLevel` did. Other handlers do not travel.

    Attributes:
        levels: Of loggers that have one of their own, by name; "" is the root.
        format: Format and date format of the root's output to stdout or stderr; None: there is none.
    """

    levels: Mapping[str, int]
    format: tuple[str, str | None] | None

    @classmethod
    def take(cls) -> "LoggingSetup":
        """Returns that of this process."""
        root = logging.getLogger()
        loggers = {"": root, **root.manager.loggerDict}
        levels = {
            name: each.level
            for name, each in loggers.items()
            if isinstance(each, logging.Logger)
            and each.level != _DEFAULTS.get(name, logging.NOTSET)
        }
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        for handler in root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                used = handler.formatter or logging.Formatter()
                return cls(levels, (used._fmt or logging.BASIC_FORMAT, used.datefmt))
        return cls(levels, None)

    def apply(self) -> None:
        """Gives it to this process, where the root has no handler yet."""
        if self.format is not None:
            logging.basicConfig(format=self.format[0], datefmt=self.format[1])
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
