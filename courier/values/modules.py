"""Finds modules that others have imported, without importing them."""

import sys
from typing import Any


def loaded_module(name: str) -> Any:
    """Returns a module if it has been imported in this process, or None.

    While another thread imports it for the first time, it lacks attributes: None until that is over.

    Example:
        if (torch := lowlevel.loaded_module("torch")) is not None:
            torch.set_num_threads(1)
    """
    module = sys.modules.get(name)
    # Python itself checks this before it uses a module without a lock.
    is_partial = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if is_partial else module
