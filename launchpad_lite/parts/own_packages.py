"""Refuses files of others that Python finds in place of our packages, or among them, at import."""

import importlib.util
from pathlib import Path

#: Our packages beside this one, each with a file that only ours has, and what only its `__init__.py` says.
_MARKS = {
    "courier": ("lowlevel.py", b"courier.client.client"),
    "launchers": ("supervision/__init__.py", b"launchers: where programs run"),
}
#: All files of ours in the folder `launchers`.
_LAUNCHERS = ("__init__.py", "process.py", "ssh.py", "thread.py")
#: Distributions of the original Launchpad, with packages `courier` and `launchpad` of their own.
_ORIGINALS = ("dm-launchpad", "dm-launchpad-nightly")


def _find(name: str) -> str:
    """Returns the folder of one of our packages."""
    mark, text = _MARKS[name]
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # the user's script has put an object there that is no module
        spec = None
    folders = (spec and spec.submodule_search_locations) or ()
    init = spec and spec.origin
    marked = next((folder for folder in folders if Path(folder, mark).is_file()), None)
    if marked and init and text in Path(init).read_bytes():
        return marked
    ours = Path(__file__).resolve().parents[2]
    if (shared := ours / "courier" / "_distributions.py").is_file():
        import runpy

        runpy.run_path(str(shared))["refuse_others"](name)
    if marked:
        raise ImportError(
            f"files of launchpad-lite in {marked} were replaced or taken away: another distribution with a "
            f"package {name!r} was installed or uninstalled. Run: pip install --force-reinstall --no-deps launchpad-lite"
        )
    theirs = init or next(iter(folders), None)
    if theirs is None:
        raise ImportError(
            f"launchpad_lite needs its package {name!r}, which should be at {ours / name}"
        )
    raise ImportError(
        f"{theirs} hides the package {name!r} of launchpad_lite at {ours / name}: Python finds yours first. "
        "Rename yours"
    )


def refuse_original() -> None:
    """Refuses an environment with the original Launchpad; the error has commands that repair it."""
    from courier.lowlevel import refuse_others

    refuse_others("launchpad", _ORIGINALS)


_find("courier")  # which looks for strangers in its folder itself
_launchers = _find("launchers")
from courier.lowlevel import refuse_strangers  # noqa: E402 - not before it is known to be ours

refuse_strangers("launchers", _launchers, _LAUNCHERS)
