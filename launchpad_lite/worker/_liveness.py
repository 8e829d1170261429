"""Signs of life of a node: the worker's half. `life.program_life` has the other."""

import threading
import time
from collections.abc import Callable, Sequence

import courier
from courier.lowlevel import surviving
from launchpad_lite.life.policies import Liveness

_SIGNS_PER_LIMIT = 4  # signs of life within each limit: some may be late on a busy machine

#: For each server of a node: whether calls wait because all threads are busy, and how many have
#: ended.
Load = Sequence[tuple[bool, int]]


class SignsOfLife:
    """Reports that a node lives, while it does. Thread-safe."""

    def __init__(
        self,
        liveness: Liveness,
        report_health: Callable[[], None],
        report_heartbeat: Callable[[], None],
        load: Callable[[], Load],
    ) -> None:
        self._liveness = liveness
        self._report_health = report_health
        self._report_heartbeat = report_heartbeat
        self._load = load
        self._heartbeats = 0
        self._reported_at = -float("inf")
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        #: Where the node serves, and the certificates for that.
        self._served: tuple[str | None, courier.TlsCredentials | None] = None, None

    def heartbeat(self) -> None:
        self._heartbeats += 1
        period_s = self._liveness.heartbeat_report_s
        if period_s is None:
            return
        now = time.monotonic()
        if now - self._reported_at >= period_s:
            self._reported_at = now
            self._report_heartbeat()

    def start(self, endpoint: str | None, tls: courier.TlsCredentials | None = None) -> None:
        """Begins to report health, or goes on with another `endpoint`; None: the node serves nothing."""
        self._served = endpoint, tls
        if self._liveness.health_s is not None and self._thread is None:
            self._thread = threading.Thread(
                target=self._check,
                args=(self._liveness.health_s,),
                name="launchpad-health",
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _check(self, limit_s: float) -> None:
        period_s = limit_s / _SIGNS_PER_LIMIT
        before: Load = []
        beats = 0
        # By its address, as other nodes, to show that they can reach it.
        while not self._ended.wait(period_s):
            with surviving("the thread that asks the node whether it is well", 0.0):
                load, beats_before, beats = self._load(), beats, self._heartbeats
                goes_on = beats != beats_before or not _is_stuck(before, load)
                before = load
                endpoint, tls = self._served
                is_well = endpoint is None or courier.is_healthy(endpoint, period_s, tls=tls)
                if goes_on and is_well:
                    self._report_health()


def _is_stuck(before: Load, now: Load) -> bool:
    """Returns whether calls wait at a server where no call has ended between two checks."""
    return any(waits and (waits, ended) in before for waits, ended in now)
