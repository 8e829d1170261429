"""Replicas in threads, which exchange tensors in memory."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from launchpad_lite.replicas._carrier import Carrier
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas.errors import ReplicaLostError
from tests.launchpad_lite.replicas.carriers import run
from tests.launchpad_lite.replicas.together import in_memory

# The first optimizer of a process loads it. With PyTorch itself, that takes longer than a fast test
# may, whichever test is the first.
with contextlib.suppress(ImportError):
    import torch._dynamo  # noqa: F401


def run_replicas(
    size: int, function: Callable[..., Any], inputs: Sequence[Any] | None = None
) -> list[Any]:
    """Returns what a function returns in each replica, for its collectives and its input, if any."""
    carriers = in_memory(size)

    def replicate(carrier: Carrier) -> Any:
        collectives = Collectives(carrier)
        mine = () if inputs is None else (inputs[carrier.rank],)
        try:
            return function(collectives, *mine)
        except Exception as error:
            for other in carriers:
                other.abort(ReplicaLostError(str(error)))
            raise
        finally:
            collectives.close()

    results = run(carriers, replicate, timeout_s=100.0)
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, ReplicaLostError))
    return results
