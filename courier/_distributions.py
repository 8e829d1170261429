"""Refuses a mixture of our packages with those of another distribution, at import.

pip lets a distribution replace files of another. `courier` of PyPI, a toolkit for email, and `dm-launchpad`
have a package `courier`, too. launchpad_lite runs this file by its path where `courier` is not ours, so it
imports nothing of ours.
"""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_OURS = "launchpad-lite"
#: All files of ours beside this one.
_MODULES = frozenset(
    {"__init__.py", "_distributions.py", "_later.py", "_timing.py", "errors.py", "lowlevel.py"}
)


def refuse_strangers(package: str, folder: str, modules: Collection[str] = _MODULES) -> None:
    """Refuses modules of another distribution in the folder of one of our packages.

    Args:
        package: Its name.
        folder: Its path.
        modules: The files of ours in it. If it has no other modules, this takes microseconds.

    Raises:
        ImportError: An installed distribution has the package, too. The message says what to do.

    Example:
        lowlevel.refuse_strangers("launchers", folder, ("__init__.py", "ssh.py"))
    """
    if any(each.suffix == ".py" and each.name not in modules for each in Path(folder).iterdir()):
        refuse_others(package)


def refuse_others(package: str, names: Collection[str] = ()) -> None:
    """Refuses other distributions that have one of our packages.

    Args:
        package: Its name.
        names: The distributions to look for; none: all that are installed, which takes up to a second.

    Raises:
        ImportError: Some are installed. The message has their paths and ours, and says what to do.

    Example:
        lowlevel.refuse_others("launchpad", ["dm-launchpad"])
    """
    from importlib import metadata

    found = {}
    for name in (*names, f"{_OURS}-compat"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.distribution(name)
    compat = f" {_OURS}-compat" if found.pop(f"{_OURS}-compat", None) else ""
    if not names:
        for each in metadata.distributions():
            # Its name comes last: what an interrupted installation left may have none.
            if any(f.parts[0] == package for f in each.files or ()) and each.name != _OURS:
                found[each.name] = each
    if found:
        theirs = [
            f"{name} {each.version} at {each.locate_file(package)}"
            for name, each in sorted(found.items())
        ]
        raise ImportError(
            f"{_OURS} at {Path(__file__).resolve().parents[1] / package} and {' and '.join(theirs)} have packages "
            f"of the same name, `{package}`: Python finds one of them, or a mixture of their files. To use {_OURS} "
            f"here, run: pip uninstall --yes {' '.join(sorted(found))}; pip install --force-reinstall --no-deps "
            f"{_OURS}{compat}. To use both, install each in an environment of its own"
        )
