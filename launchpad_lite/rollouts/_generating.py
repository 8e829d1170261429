"""A generator as a node: makes rollouts by code of the user."""

import contextlib
import contextvars
import threading
import time
import traceback
import uuid
from typing import Any

import courier
import launchpad_lite as lp
from courier.lowlevel import shortened
from launchpad_lite.process.activity import activities
from launchpad_lite.process.forcing import ForcedExit
from launchpad_lite.rollouts._buffer import GeneratorLife, MadeRollout, RolloutOrder
from launchpad_lite.rollouts._patience import SILENT_S, call_patiently
from launchpad_lite.rollouts.weights import WeightsClient

#: Seconds for which a call waits for work, and between two heartbeats.
_POLL_S, _BEAT_S = 5.0, 1.0
#: Seconds after which the buffer is told what a rollout waits for.
_LONG_S = 2.0
_MOST_TEXT = 4000


class GeneratorNode:
    """Makes rollouts, in threads of its own, until the program stops.

    It has no `run`: a program ends when its trainer has ended.
    """

    def __init__(self, buffer: Any, weights: WeightsClient, generator: Any, threads: int) -> None:
        self._buffer = courier.with_timeout(buffer, SILENT_S)
        self._give = buffer.give  # of any size
        self._threads = threads
        self._weights = weights
        self._generator = generator
        self._who = GeneratorLife(lp.current_node().name, uuid.uuid4().hex)
        self._lock = threading.Lock()
        #: By token, the thread that makes it, and since when.
        self._held: dict[str, tuple[int, float]] = {}
        self._reading = threading.Lock()
        self._params: Any = None
        self._version = 0
        self._ends = threading.Event()
        lp.register_stop_handler(self._ends.set)
        for work in (self._beat, *[self._work] * threads):
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(work,), daemon=True).start()

    def _work(self) -> None:
        try:
            while not self._ends.is_set():
                found = call_patiently(self._buffer.take, self._who, _POLL_S, stop=self._ends)
                if found is not None:
                    self._make(*found)
        except courier.CallCancelledError:
            pass  # the program stops

    def _make(self, order: RolloutOrder, prompt: Any) -> None:
        began_at = time.monotonic()
        with self._lock:
            self._held[order.token] = threading.get_ident(), began_at
        try:
            params, version = self._newest(order.version)
            value = courier.dumps(self._generator.generate(prompt, params))
        except ForcedExit:
            raise
        except BaseException as error:  # noqa: BLE001 - it may succeed elsewhere
            if not self._ends.is_set():  # else: as calls raise when the program stops
                text = shortened("".join(traceback.format_exception(error)), _MOST_TEXT)
                call_patiently(self._buffer.fail, order.token, text, stop=self._ends)
        else:
            took_s = time.monotonic() - began_at
            made = MadeRollout(value, version, self._who.name, took_s)
            call_patiently(self._give, order.token, made, stop=self._ends)
        finally:
            with self._lock:
                del self._held[order.token]

    def _newest(self, wanted: int) -> tuple[Any, int]:
        """Returns weights that are new enough; all threads share them."""
        with self._reading:
            if self._version < wanted:
                self._params, self._version = self._weights.get(self._version)
            return self._params, self._version

    def _beat(self) -> None:
        while not self._ends.wait(_BEAT_S):
            with self._lock:
                held = dict(self._held)
            now = time.monotonic()
            doing = {
                token: _doing(ident) if now - began_at > _LONG_S else ""
                for token, (ident, began_at) in held.items()
            }
            # The next one may reach it.
            with contextlib.suppress(courier.ServerGoneError, courier.CallTimeoutError):
                self._buffer.beat(self._who, doing, self._threads)


def _doing(ident: int) -> str:
    """Returns what a thread does now, for people."""
    for each in activities({}, [ident]):
        if each.server:
            return f"waits for {each.server}.{each.method}"
        return f"is at {each.place}"
    return ""
