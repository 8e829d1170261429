"""Versions of weights that pass from reader to reader, so that not all machines get them from one."""

import functools
import os
import pickle
import threading
import time
from typing import Any, NamedTuple

import courier
import launchpad_lite as lp
from courier import lowlevel
from launchpad_lite.rollouts._patience import SILENT_S, call_patiently

#: Seconds for which a reader asks only the node, after another reader did not answer; they double.
_ALONE_S = 60.0


class SentWeights(NamedTuple):
    """A version, as a reader gets it."""

    #: 0: there is none in time; below 0: the one that was asked for is there no more.
    version: int = 0
    #: The version to which `value` has the leaves that differ, by their number; 0: it has all.
    since: int = 0
    value: Any = None
    #: The reader that has the value; empty: it is here.
    holder: str = ""


class WeightsRelay:
    """What this process has got from another machine, for other readers. Thread-safe."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._secret, self._tls = lowlevel.credentials(node)
        #: Others may come to have a port of a reader, such as readers of other weights.
        self._method = ""
        self._address: str | None = None
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._newer = threading.Condition()
        self._sent = SentWeights()
        self._alone_s, self._alone_until = _ALONE_S, 0.0
        #: Seconds that another reader has to answer.
        self._limit_s = SILENT_S
        self._ends = False

    def __reduce__(self) -> Any:
        return WeightsRelay, (self._node,)

    def address(self) -> str:
        """Returns where it passes on what it keeps; empty if it does not, as in a forked child."""
        if os.getpid() != self._process:
            return ""
        with self._starting:
            if self._address is None:
                seen = call_patiently(courier.with_timeout(self._node, SILENT_S).seen_at)
                host, name = seen or ("", "")
                self._method = f"weights of {name}"
                self._address = self._start(host) if host else ""
        return "" if time.monotonic() < self._alone_until else self._address

    def _start(self, host: str) -> str:
        server = courier.Server(host=host, secret=self._secret, tls=self._tls)
        server.bind(self._method, courier.idempotent(self._get))
        try:
            server.start()
        except courier.AddressInUseError:  # the address is not this machine's own
            return ""
        lp.register_stop_handler(lambda: self._end(server))
        return server.address

    def _end(self, server: courier.Server) -> None:
        with self._newer:
            self._ends, self._sent = True, SentWeights()
            self._newer.notify_all()
        server.stop(0.0)

    def _get(self, version: int, since: int, wait_s: float) -> SentWeights:
        with self._newer:
            self._newer.wait_for(lambda: self._sent.version >= version or self._ends, wait_s)
            if self._sent.version < version:
                return SentWeights()
            return self._sent if self._sent.since in (0, since) else SentWeights(-1)

    def keep(self, sent: SentWeights, took_s: float) -> None:
        """Has what was received for others, who may take as long as that took, and more."""
        self._limit_s = SILENT_S + 3 * took_s
        shared = sent._replace(value=courier.Shared(sent.value))
        # Packs it now: the reader may write to its own.
        pickle.dumps(shared, 5, buffer_callback=lambda _: None)
        self._put(shared)

    def drop(self, version: int) -> None:
        """Frees what is older than a version that this process has got and does not pass on."""
        self._put(SentWeights(version, -1))

    def _put(self, sent: SentWeights) -> None:
        with self._newer:
            if not self._ends:
                self._sent = max(self._sent, sent, key=lambda each: each.version)
                self._newer.notify_all()

    def ask(self, told: SentWeights) -> SentWeights:
        """Returns a version from the reader that has it, or a newer one; none if it does not answer in time."""
        limit_s = self._limit_s
        client: Any = courier.Client(
            told.holder,
            secret=self._secret,
            tls=self._tls,
            call_timeout_s=limit_s,
            wait_for_ready=False,
        )
        close = functools.partial(courier.close, client)
        lp.register_stop_handler(close)
        try:
            get = getattr(client, self._method)
            sent: SentWeights = get(told.version, told.since, limit_s)
        except courier.CourierError:  # whoever has that port now
            sent = SentWeights()
        finally:
            lp.unregister_stop_handler(close)
            close()
        if not sent.version:
            with self._newer:  # several threads may have asked the same
                if time.monotonic() >= self._alone_until:
                    self._alone_until = time.monotonic() + self._alone_s
                    self._alone_s *= 2
        return sent
