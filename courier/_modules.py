"""Modules of packages that others import, and we do not."""

import sys
from typing import Any


def loaded_module(name: str) -> Any:
    """Returns a module if it has been imported in this process, or None.

    While another thread imports it for the first time, it lacks attributes: None until that is over.
    """
    module = sys.modules.get(name)
    # What Python itself asks before it takes a module without a lock.
    is_partial = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if is_partial else module
