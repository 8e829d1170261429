"""Sends the script's set-up of `logging` and `warnings` to workers, which do not run the script."""

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_DEFAULTS = {"": logging.WARNING}


class LoggingSetup(NamedTuple):
    """The state of `logging.basicConfig`, `Logger.setLevel` and `warnings`, without other handlers."""

    levels: Mapping[str, int]  # levels of loggers that have their own, by name; "" is the root
    #: Format and date format of the root's output to stdout or stderr; None: there is none.
    format: tuple[str, str | None] | None
    #: Filters of warnings; categories that are not built in by name.
    filters: Sequence[tuple[Any, ...]]
    is_of_absl: bool = False  # whether the root has the handler of absl, which `app.run` sets

    @classmethod
    def take(cls) -> "LoggingSetup":
        root = logging.getLogger()
        loggers = {"": root, **root.manager.loggerDict}
        levels = {
            name: each.level
            for name, each in loggers.items()
            if isinstance(each, logging.Logger)
            and each.level != _DEFAULTS.get(name, logging.NOTSET)
        }
        filters = [(act, text, _named(kind), *at) for act, text, kind, *at in warnings.filters]
        if (absl := sys.modules.get("absl.logging")) and absl.get_absl_handler() in root.handlers:
            return cls(levels, None, filters, is_of_absl=True)
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        for handler in root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in streams:
                used = handler.formatter or logging.Formatter()
                return cls(levels, (used._fmt or logging.BASIC_FORMAT, used.datefmt), filters)
        return cls(levels, None, filters)

    def apply(self) -> None:
        """Applies it to this process, where the root has no handler yet."""
        if self.is_of_absl:
            from absl import logging as absl_logging

            absl_logging.use_absl_handler()
        if self.format is not None:
            logging.basicConfig(format=self.format[0], datefmt=self.format[1])
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        warnings.resetwarnings()
        filters = [(act, text, _category(name), *at) for act, text, name, *at in self.filters]
        warnings.filters[:] = filters  # type: ignore[index]


def _named(category: Any) -> Any:
    is_ours = category.__module__ != "builtins"
    return (category.__module__, category.__qualname__) if is_ours else category


def _category(named: Any) -> Any:
    is_ours = isinstance(named, tuple)
    return _Category(named[1], (), {"__module__": named[0]}) if is_ours else named


class _Category(type):
    """Replaces, in a filter, the category of its name, which may not be imported here."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return _named(cls) in map(_named, subclass.__mro__)
