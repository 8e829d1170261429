"""Signals wake the main thread, whichever thread took them.

The kernel gives a signal to any thread, and Python runs handlers in the main thread only. While that
one waits without a limit, for a lock for instance, it does not notice what another thread took.
"""

import contextlib
import os
import signal
import threading
import time

#: Interrupts what the main thread waits for. By default nothing happens when it comes, and hardly any
#: program uses it.
_WAKE = signal.SIGURG
#: Pauses before it is sent, and sent again: the main thread may have been just about to wait.
_PAUSES_S = (0.0, 0.05, 0.5)


class _SignalWaker:
    """A thread that learns of each signal of this process and wakes the main thread for it."""

    def __init__(self) -> None:
        #: Where the interpreter writes the number of each signal; empty: nothing is installed.
        self._pipe: tuple[int, ...] = ()
        #: Where others read these numbers: the script, or its event loop. -1: nowhere.
        self._next = -1

    def install(self) -> None:
        """Starts it; again, if other code has taken its place. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._pipe:
            pipe = os.pipe()
            os.set_blocking(pipe[1], False)
            thread = threading.Thread(
                target=self._work,
                args=(pipe[0], threading.get_ident()),
                name="signal-waker",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to end, or has no room
                for descriptor in pipe:
                    os.close(descriptor)
                return
            self._pipe = pipe
            if signal.getsignal(_WAKE) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(_WAKE, lambda *_: None)
        before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if before != self._pipe[1]:
            self._next = before

    def _work(self, source: int, main: int) -> None:
        while True:
            came = os.read(source, 4096).replace(bytes([_WAKE]), b"")
            if came and self._next >= 0:
                with contextlib.suppress(OSError):  # it is full, or closed
                    os.write(self._next, came)
            for pause_s in _PAUSES_S if came else ():
                time.sleep(pause_s)
                signal.pthread_kill(main, _WAKE)

    def forget(self) -> None:
        """In a forked child: leaves all to the parent."""
        if self._pipe:
            if (current := signal.set_wakeup_fd(-1)) != self._pipe[1]:
                signal.set_wakeup_fd(current)
            for descriptor in self._pipe:
                os.close(descriptor)
            self._pipe = ()


SIGNAL_WAKER = _SignalWaker()
os.register_at_fork(after_in_child=SIGNAL_WAKER.forget)
