"""How long internals wait, in one place, so that tests can say otherwise."""

from typing import NamedTuple


class Timing(NamedTuple):
    """How long servers and clients wait for things that users do not set. For tests.

    Which fields there are is no promise.
    """

    #: Of a client: what one attempt to connect may take, from the first packet to the welcome.
    attempt_s: float = 10.0
    #: The same where gRPC is tried after something else was refused.
    grpc_attempt_s: float = 3.0
    #: How long something may take to answer that speaks HTTP/2.
    probe_s: float = 1.0
    #: What stopping a server adds to its deadline, so that handlers which heed their cancellation
    #: can end.
    epilogue_s: float = 0.5
    #: How often a server gives back what was not used for long.
    tidy_s: float = 5.0
    #: How long a server that ends waits for its poller, where that runs no call.
    poller_end_s: float = 10.0
    #: Shared memory that was not used for so long is given back to the system.
    segment_idle_s: float = 15.0
    #: A server of a pool that could not be reached is passed over for so long.
    pool_down_s: float = 1.0
    #: A key of a pool waits so long for a server that was never there: programs start their nodes
    #: at the same time, and a key that went elsewhere at first would not find there what it left.
    pool_start_s: float = 30.0
    #: Seconds after which an idle batched handler leaves no thread behind.
    batch_idle_s: float = 0.2


#: The default.
DEFAULT = Timing()
