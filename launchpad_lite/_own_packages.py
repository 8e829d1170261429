"""Refuses files of others that Python finds in place of our packages. Checked when imported."""

import importlib.util
from contextlib import suppress
from pathlib import Path

#: Our packages beside this one, each with a file that only ours has.
_MARKS = {"courier": "_parcel.py", "launchers": "_supervisor.py"}
#: What our `courier/__init__.py` says, and nobody else's.
_COURIER = b"courier._client"
#: Distributions of the original Launchpad, with packages `courier` and `launchpad` of their own.
_ORIGINALS = ("dm-launchpad", "dm-launchpad-nightly")


def _check(name: str, mark: str) -> None:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # the user's script has put something there that is no module
        spec = None
    folders = (spec and spec.submodule_search_locations) or ()
    if any(Path(folder, mark).is_file() for folder in folders):
        init = spec and spec.origin
        if name == "courier" and not (init and _COURIER in Path(init).read_bytes()):
            refuse_original(is_mixed=True)
        return
    refuse_original()
    ours = Path(__file__).resolve().parents[1] / name
    theirs = (spec and spec.origin) or next(iter(folders), None)
    if theirs is None:
        raise ImportError(f"launchpad_lite needs its package {name!r}, which should be at {ours}")
    raise ImportError(
        f"{theirs} hides the package {name!r} of launchpad_lite at {ours}: Python finds yours first. "
        "Rename yours"
    )


def refuse_original(*, is_mixed: bool = False) -> None:
    """Refuses an environment where the original Launchpad is installed beside us.

    Args:
        is_mixed: Whether it was, by what is left of our files.

    Raises:
        ImportError: It is so. The message has the commands that mend it.
    """
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in (*_ORIGINALS, "launchpad-lite-compat"):
        with suppress(PackageNotFoundError):
            found[name] = f"{name} {version(name)}"
    compat = " launchpad-lite-compat" if found.pop("launchpad-lite-compat", None) else ""
    if found or is_mixed:
        raise ImportError(
            f"launchpad-lite and {' and '.join(found.values()) or 'dm-launchpad'} have packages of the same "
            "names, `courier` and `launchpad`, so that the files of one replace, or take away, those of the "
            f"other. To use launchpad-lite, run: pip uninstall --yes {' '.join(found) or 'dm-launchpad'}; "
            f"pip install --force-reinstall --no-deps launchpad-lite{compat}"
        )


for _name, _mark in _MARKS.items():
    _check(_name, _mark)
