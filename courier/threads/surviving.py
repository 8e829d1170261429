"""Keeps threads alive after errors, because others depend on them."""

import contextlib
import logging
import time
from collections.abc import Iterator

#: Seconds after an error, which may come each time.
PAUSE_S = 0.1

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def surviving(who: str, pause_s: float = PAUSE_S) -> Iterator[None]:
    """Logs an error of the block instead of ending the thread; the next round may go well.

    Args:
        who: The thread, as text.
        pause_s: Seconds to wait after an error, which may come each time, so that it takes no whole
            core and fills no disk with logs.

    Example:
        while is_needed:
            with lowlevel.surviving("the thread that reads"):
                read()
    """
    try:
        yield
    except Exception:  # noqa: BLE001 - others depend on the thread
        _log.exception("%s met an error of its own, and continues", who)
        time.sleep(pause_s)
