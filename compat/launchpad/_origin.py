"""Refuses to mix with the original Launchpad, whose import package has the same name."""

import importlib.metadata
from contextlib import suppress

#: Distributions with an import package `launchpad` of DeepMind's.
_ORIGINALS = ("dm-launchpad", "dm-launchpad-nightly")

for _name in _ORIGINALS:
    with suppress(importlib.metadata.PackageNotFoundError):
        raise ImportError(
            f"{_name} {importlib.metadata.version(_name)} is installed beside launchpad-lite-compat, and "
            "both have an import package `launchpad`, so that their files are mixed. Uninstall both, and "
            f"install the one you want: pip uninstall {_name} launchpad-lite-compat"
        )
