"""How long internals wait, in one place, so that tests can change it."""

from typing import NamedTuple


class Timing(NamedTuple):
    """Seconds that servers and clients wait, where users set nothing. For tests.

    Its fields are no promise.
    """

    #: Of a client: one attempt to connect, from the first packet to the welcome.
    attempt_s: float = 10.0
    #: The same for gRPC, which is tried after our own protocol was refused.
    grpc_attempt_s: float = 3.0
    #: How long a peer that speaks HTTP/2 may take to answer.
    probe_s: float = 1.0
    #: Added to the deadline of a stopping server, so that cancelled handlers can end.
    epilogue_s: float = 0.5
    #: How often a server frees memory that was not used for long.
    tidy_s: float = 5.0
    #: How long an ending server waits for its poller, if that runs no call.
    poller_end_s: float = 10.0
    #: Unused shared memory is freed after so long.
    segment_idle_s: float = 15.0
    #: How long a pool passes over a server that could not be reached.
    pool_down_s: float = 1.0
    #: How long a key of a pool waits for a server that was never there. Programs start their nodes
    #: at the same time: a key that went elsewhere at first would lose its data there.
    pool_start_s: float = 30.0
    #: Threads of an idle batched handler end after so long.
    batch_idle_s: float = 0.2


DEFAULT = Timing()
