"""Refuses files of a user that Python finds in place of our packages. Checked when imported."""

import importlib.util
from pathlib import Path

#: Our packages beside this one, each with a file that only ours has.
_MARKS = {"courier": "_parcel.py", "launchers": "_supervisor.py"}


def _check(name: str, mark: str) -> None:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # the user's script has put something there that is no module
        spec = None
    folders = (spec and spec.submodule_search_locations) or ()
    if any(Path(folder, mark).is_file() for folder in folders):
        return
    ours = Path(__file__).resolve().parents[1] / name
    theirs = (spec and spec.origin) or next(iter(folders), None)
    if theirs is None:
        raise ImportError(f"launchpad_lite needs its package {name!r}, which should be at {ours}")
    raise ImportError(
        f"{theirs} hides the package {name!r} of launchpad_lite at {ours}: Python finds yours first. "
        "Rename yours"
    )


for _name, _mark in _MARKS.items():
    _check(_name, _mark)
