"""How long the supervisor of a program waits, where users choose nothing."""

from typing import NamedTuple


class Timing(NamedTuple):
    """Limits of a program's life, in seconds."""

    terminate_s: float = 1.0  # between SIGTERM and SIGKILL
    give_up_s: float = 1.0  # after SIGKILL, until a worker that has not ended is left behind
    #: To wait for the cause when only consequences are known: on one host, where the end of a
    #: process is known at once. Also the most seconds between the failures of a node and its caller
    #: for the first to count as the cause, if the caller names none.
    blame_s: float = 0.5
    #: In which a node that does not check for the stop may go on to call, and delays its callees:
    #: it may wait for one of them that answers only when it is asked to stop, too.
    unaware_s: float = 0.5
    cause_s: float = 10.0  # in which the failure of a restarted node can be the cause of another's
    #: By which this process was asleep, if it checks a deadline so late: nodes are not to blame.
    overslept_s: float = 1.0
    #: Between checks of the clock while nodes have limits, to notice a suspended machine.
    look_s: float = 1.0
    #: Between checks for nodes that are idle, at first, to look whether they wait for each other. Each
    #: pause is twice the one before, while the same nodes are idle.
    deadlock_s: float = 2.5
    stalled_s: float = 40.0  # such a pause, after which it is told that all nodes wait
    handlers_s: float = 2.0  # for stop handlers, after the end of the code that they belong to


DEFAULT = Timing()
