"""How long the two sides of a host wait. Only tests choose their own times."""

from typing import NamedTuple


class Timing(NamedTuple):
    """Times of a host that comes up.

    Attributes:
        last_words_s: Seconds to wait for the error output of a host's programs, for a message. The pipe may
            stay open: ssh leaves a process in the background for other sessions (ControlPersist).
        close_s: The same when no message needs the output.
        soon_s: Seconds after which silent addresses are given up, if each host was reached by another one.
    """

    last_words_s: float = 3.0
    close_s: float = 0.5
    soon_s: float = 1.0


DEFAULT = Timing()
