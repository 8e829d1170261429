"""What keeps threads alive that others depend on."""

import contextlib
import logging
import time
from collections.abc import Iterator

#: After an error that may come each time.
PAUSE_S = 0.1

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def surviving(who: str, pause_s: float = PAUSE_S) -> Iterator[None]:
    """Logs an error of the block instead of ending the thread; the next round may go well.

    Args:
        who: The thread, for people to read.
        pause_s: Seconds to wait after an error, which may come each time: it is to take no whole
            core, nor to fill a disk with what is logged.
    """
    try:
        yield
    except Exception:  # noqa: BLE001 - others depend on the thread, whatever it was
        _log.exception("%s met an error of its own, and continues", who)
        time.sleep(pause_s)
