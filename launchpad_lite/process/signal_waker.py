"""Signals wake the main thread, also those that another thread received.

The kernel gives a signal to any thread, and Python runs handlers in the main thread only. While
that waits without a limit, for a lock for instance, it does not notice signals of other threads.
"""

import contextlib
import functools
import os
import select
import signal
import threading
from pathlib import Path

#: Interrupts waits of the main thread. It is ignored by default, and hardly any program uses it.
_WAKE = signal.SIGURG
#: Pauses before it is sent, and sent again, because the main thread may be just about to wait.
_PAUSES_MS = (0, 50, 500)


class _SignalWaker:
    """A thread that reads each signal of this process and wakes the main thread."""

    def __init__(self) -> None:
        #: The descriptor to which the interpreter writes signal numbers. -1: not installed.
        self._sink = -1
        #: A copy of the descriptor that the script, or its event loop, has set before. They may
        #: close theirs at any time, and its number may become that of another file.
        self._next = -1

    def install(self) -> None:
        """Starts it; again, if other code has taken its place. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._sink < 0:
            source, self._sink = os.pipe()
            os.set_blocking(self._sink, False)
            self._next = os.open(os.devnull, os.O_WRONLY)
            if signal.getsignal(_WAKE) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(_WAKE, lambda *_: None)
            work = functools.partial(self._work, source, threading.get_ident())
            threading.Thread(target=work, name="signal-waker", daemon=True).start()
        before = signal.set_wakeup_fd(self._sink, warn_on_full_buffer=False)
        if before != self._sink:
            # The other descriptor may be closed already.
            with Path(os.devnull).open("wb") as nowhere, contextlib.suppress(OSError):
                os.dup2(nowhere.fileno() if before < 0 else before, self._next, inheritable=False)

    def _work(self, source: int, main: int) -> None:
        numbers = select.poll()
        numbers.register(source, select.POLLIN)
        pauses_ms: list[int] = []
        while True:
            if not numbers.poll(pauses_ms[0] if pauses_ms else None):
                del pauses_ms[0]
                signal.pthread_kill(main, _WAKE)
            elif came := os.read(source, 4096).replace(bytes([_WAKE]), b""):
                pauses_ms = [*_PAUSES_MS]
                with contextlib.suppress(OSError):  # it is full, or closed
                    os.write(self._next, came)

    def forget(self) -> None:
        """In a forked child: leaves all to the parent."""
        if self._sink >= 0 and (current := signal.set_wakeup_fd(-1)) != self._sink:
            signal.set_wakeup_fd(current)
        self._sink = -1


SIGNAL_WAKER = _SignalWaker()
os.register_at_fork(after_in_child=SIGNAL_WAKER.forget)
