"""How long the two sides of a host wait. Only tests choose their own times."""

from typing import NamedTuple


class Timing(NamedTuple):
    """Times of a host that comes up.

    Attributes:
        last_words_s: Seconds for what a host's programs complained of to arrive, where it is the
            explanation. What ssh leaves in the background for other sessions (ControlPersist) holds
            its end open.
        close_s: The same where no thread waits for it.
        soon_s: Seconds after which an address that is silent is given up if the host was reached by
            another one.
    """

    last_words_s: float = 3.0
    close_s: float = 0.5
    soon_s: float = 1.0


DEFAULT = Timing()
