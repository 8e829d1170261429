"""Replicas in threads, which exchange tensors in memory."""

import contextlib
from collections.abc import Callable
from typing import Any

from launchpad_lite import replicas
from launchpad_lite.replicas._collectives import Collectives
from tests.launchpad_lite.replicas.together import in_memory, returned, together

# The first optimizer of a process loads it. With PyTorch itself, that takes longer than a fast test
# may, whichever test is the first.
with contextlib.suppress(ImportError):
    import torch._dynamo  # noqa: F401


def run_replicas(size: int, function: Callable[[Collectives], Any]) -> list[Any]:
    """Returns what a function returns in each replica, for its collectives."""

    def story(repl: replicas.Replicator) -> Any:
        with contextlib.closing(repl._me.collectives) as collectives:
            return function(collectives)

    return returned(together(in_memory(size), story))
