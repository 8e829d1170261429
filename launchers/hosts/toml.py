"""Options of launchers in TOML files."""

import importlib
from pathlib import Path
from typing import Any


def read_toml(path: Path) -> dict[str, Any]:
    """Returns what a TOML file says. A ValueError says which file cannot be read and why."""
    try:
        content: dict[str, Any] = _parser().loads(path.read_text(encoding="utf-8"))
    except (OSError, ImportError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{path} cannot be read: {reason}") from error
    except ValueError as error:  # it is not TOML, or not even text
        raise ValueError(f"{path} is no TOML file: {error}") from error
    return content


def _parser() -> Any:
    for name in ("tomllib", "tomli"):  # the first is part of Python since 3.11
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ImportError("this needs tomli: pip install 'launchpad-lite[ssh]' (or [kubernetes])")
