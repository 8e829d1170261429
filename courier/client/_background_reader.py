"""One thread that reads answers of calls without a waiting thread, for all clients of a process."""

import threading
import time
import weakref

from courier.client._link import Link
from courier.threads.abandoned import clear_up, wakers
from courier.threads.forks import survive
from courier.threads.locks import RLock
from courier.threads.surviving import surviving
from courier.values import frozen, reused
from courier.wire.watching import HANG_UP, READ, Watcher, make_watcher

#: Seconds after which it checks whether a caller reads the answers itself.
_TICK_S = 0.001
#: The pause while one does.
_LED_TICK_S = 0.005
_IDLE_S = 5.0
_WHO = "the background reader of courier clients"


class BackgroundReader:
    """Reads links that have open calls and no waiting thread; notices servers that disappear."""

    def __init__(self) -> None:
        self._start_anew()
        survive(self)

    def _start_anew(self) -> None:
        self._lock = RLock()
        #: Made at once, because any code, even a finaliser, may wake it at any moment.
        self._watcher: Watcher | None = None
        self._links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
        #: Links to read, and how often a thread had led at the last check.
        self._attended: dict[Link, int] = {}
        self._thread: threading.Thread | None = None
        self._asleep = False
        #: Whether a link was added since the thread last looked.
        self._stirred = False

    # Called by clients

    def admit(self, link: Link) -> None:
        """Watches the link from now on, and notices when its server leaves."""
        with self._lock:
            if self._watcher is None:
                self._watcher = make_watcher()
            descriptor = link.fileno()
            # The thread may not be needed any more. Before the next line, so that it is called later.
            weakref.finalize(link, self.wake).atexit = False
            self._links[descriptor] = link
            self._watcher.watch(descriptor, HANG_UP, once=True)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, args=(self._watcher,), name="courier-background", daemon=True
                )
                thread.start()
                # Not before: a thread that the system refused must not count.
                self._thread = thread
                reused.begin(self)

    def dismiss(self, link: Link, descriptor: int) -> None:
        """Forgets a link that has ended; before its descriptor is closed."""
        with self._lock:
            self._attended.pop(link, None)
            if self._links.get(descriptor) is link:
                del self._links[descriptor]
                if self._watcher is not None:
                    self._watcher.forget(descriptor)
        self.wake()

    def attend(self, link: Link, *, soon: bool) -> None:
        """Has the open calls of a link answered; `soon`: no thread will wait, so read now."""
        if soon:
            self.watch(link)
        self._stirred = True
        if link not in self._attended:
            with self._lock:
                self._attended[link] = -1
        if self._asleep:
            self.wake()

    def wake(self) -> None:
        """Wakes the thread. Takes no lock: finalisers call it, too."""
        self._asleep = False
        if self._watcher is not None:
            self._watcher.wake()

    def watch(self, link: Link) -> None:
        """If calls are open, reads when something comes; otherwise only notices the end."""
        if self._watcher is not None:
            events = READ | HANG_UP if link.needs_attention else HANG_UP
            self._watcher.watch(link.fileno(), events, once=True)

    # Its thread

    def _run(self, watcher: Watcher) -> None:
        is_needed = True
        while is_needed:
            with surviving(_WHO):
                is_needed = self._go_round(watcher)

    def _go_round(self, watcher: Watcher) -> bool:
        """Checks all links once, and waits; returns whether it is still needed."""
        self._stirred = False
        clear_up()
        pause = self._look_around()
        if pause is None or pause > _LED_TICK_S:
            self._asleep = True
            # Something may have come since the check.
            if self._stirred:
                pause = _TICK_S
                self._asleep = False
        with self._lock:
            if not self._links and not self._attended:
                self._thread = None
                reused.end(self)
                return False
        events = watcher.poll(_IDLE_S if pause is None else pause)
        if not events:
            reused.tidy()  # also beside a call that stays open
            if pause is None:
                self._tidy()
        if self._asleep or not events:
            # The caller may be about to wait for the answer itself.
            time.sleep(_TICK_S / 2)
        self._asleep = False
        for descriptor, _ in events:
            self._react(descriptor)
        return True

    def _react(self, descriptor: int) -> None:
        # Not in the loop, whose variables would keep a link alive that its client has dropped.
        link = self._links.get(descriptor)
        if link is not None:
            try:
                # The current leader re-arms the watch when it resigns.
                link.passed_over = True
                link.read_now()
            except Exception as error:  # noqa: BLE001 - the others go on
                self._lose(link, error)

    def _lose(self, link: Link, error: Exception) -> None:
        with surviving(_WHO):
            link.fail(f"{type(error).__name__}: {error}")
            raise error

    def _tidy(self) -> None:
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.tidy()
        frozen.tidy()

    def _look_around(self) -> float | None:
        """Checks all links that need it; returns when to check again."""
        pauses = list[float]()
        now = time.monotonic()
        for link, leads in list(self._attended.items()):
            try:
                wanted = self._look_at(link, leads, now)
            except Exception as error:  # noqa: BLE001 - the others go on
                self._lose(link, error)
                continue
            if wanted is not None:
                pauses.append(wanted)
        return min(pauses, default=None)

    def _look_at(self, link: Link, leads: int, now: float) -> float | None:
        """Checks a link; returns when to check again, None if that is not needed any more."""
        deadline = link.expire(now)
        link.flush()
        if not link.needs_attention:
            self._release(link)
            return None
        if link.leads == leads:
            self.watch(link)
            wanted = _IDLE_S if deadline is None else max(0.0, deadline - now)
            return min(wanted, _IDLE_S) if not link.has_unsent else _LED_TICK_S
        with self._lock:
            if link in self._attended:
                self._attended[link] = link.leads
        return _TICK_S if leads < 0 else _LED_TICK_S

    def _release(self, link: Link) -> None:
        with self._lock:
            self._attended.pop(link, None)
        if link.needs_attention:
            self.attend(link, soon=False)

    def _survive_fork(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        self._start_anew()


BACKGROUND_READER = BackgroundReader()
wakers.append(BACKGROUND_READER.wake)
