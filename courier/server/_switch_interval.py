"""A shorter switch interval, so that a server answers beside handlers that compute.

A thread that computes in Python gives others a turn only every 5 ms (`sys.getswitchinterval`), and
each call would wait so long. While servers run in a process, the interval is shorter. Measured: a
call beside a busy handler is answered after 0.6 ms instead of 5.2, and the handler is no slower.

Not where TensorFlow is imported: its first operations in several threads may crash (2.15), three times
as often with the shorter interval. After its first operations, call `sys.setswitchinterval`
yourself.
"""

import sys

from courier.threads.forks import survive
from courier.threads.locks import Lock

_INTERVAL_S = 0.0005
_FRAIL = "tensorflow"


class SwitchInterval:
    """Shortens the interval between `begin` and `end` of any server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._wanted = 0
        #: The interval before.
        self._usual_s = 0.0
        survive(self)

    def begin(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted == 1:
                self._usual_s = sys.getswitchinterval()
                if self._usual_s > _INTERVAL_S and _FRAIL not in sys.modules:
                    sys.setswitchinterval(_INTERVAL_S)
                if self not in sys.meta_path:  # where it stays
                    sys.meta_path.insert(0, self)

    def end(self) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                self._restore()

    def find_spec(self, name: str, *_: object) -> None:
        """Sees each import, and finds no module."""
        if name == _FRAIL and self._wanted:
            self._restore()

    def _restore(self) -> None:
        # Keeps a value that other code has set meanwhile.
        if abs(sys.getswitchinterval() - _INTERVAL_S) < _INTERVAL_S / 100:
            sys.setswitchinterval(self._usual_s)

    def _survive_fork(self) -> None:
        self._lock = Lock()
        if self._wanted:
            self._wanted = 0
            self._restore()


SWITCH_INTERVAL = SwitchInterval()
