"""How long the supervisor of a program waits: the limits that no user chooses."""

from typing import NamedTuple


class Timing(NamedTuple):
    """Limits of a program's life, in seconds.

    Attributes:
        terminate_s: Between SIGTERM and SIGKILL.
        give_up_s: After SIGKILL, until a worker that still has not ended is given up.
        blame_s: To wait for the cause when all that is known are consequences: on one host, where
            the end of a process is known at once. Also, how far the failure of a node may be from
            that of one that calls it to be its cause, if that one does not say what it follows
            from.
        unaware_s: For which a node that does not look at the stop may go on to call, and holds up
            those it calls: it may be waiting for one of them, which will not answer before it is
            asked to stop, too.
        handlers_s: That stop handlers have once the code that they belong to has ended.
    """

    terminate_s: float = 1.0
    give_up_s: float = 1.0
    blame_s: float = 0.5
    unaware_s: float = 0.5
    handlers_s: float = 2.0


#: What users get.
DEFAULT = Timing()
