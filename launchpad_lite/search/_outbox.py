"""The tasks of a model: sends each to a broker, and gets one outcome of each.

When its broker is lost, tasks without an outcome go to another one. The first outcome of a task
counts.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import courier
from launchpad_lite.search._messages import (
    MOST_BYTES,
    Collected,
    Load,
    TaskOutcome,
    TaskProgress,
    TaskSubmission,
    first_of,
    longer,
    transfer_s,
)
from launchpad_lite.search._presence import Presence
from launchpad_lite.search.errors import LOST

#: Seconds until a full or a lost broker is tried again.
RETRY_S = 0.02
#: Seconds that one call of a collecting thread waits, between two checks of its end.
COLLECT_S = 0.5
#: Heartbeats that are skipped when the name server does not answer.
_PAUSES = 10
#: Tasks in one call.
_MOST_AT_ONCE = 1000


class Outbox:
    """The outstanding tasks of one model. One thread sends, and one, perhaps the same, collects."""

    def __init__(
        self,
        presence: Presence,
        outstanding: Mapping[str, TaskSubmission] = MappingProxyType({}),
        broker: str = "",
    ) -> None:
        """Makes one, with tasks that an earlier life has sent, and the broker that it has used."""
        self._presence = presence
        self._timing = presence.timing
        self._model = presence.member.who.name
        self._session = os.urandom(16).hex()
        self._lock = threading.RLock()
        #: Held while a broker is asked for its tasks: it would forget those that another thread
        #: sends meanwhile.
        self._asking = threading.RLock()
        self._outstanding = dict(outstanding)
        #: Those of these tasks that have begun, and whether they have a worker now.
        self._running: dict[str, bool] = {}
        #: Tasks that the newest `collect` has found to have begun: each once.
        self.begun: list[str] = []
        #: Outstanding tasks of the earlier life: brokers may have them with the code of that time.
        self._renewed = set(outstanding)
        #: Outstanding tasks that no broker has accepted yet.
        self._unsent: dict[str, None] = {}
        #: A large one of these that is being sent, and its call: smaller ones do not wait for it.
        self._large: tuple[str, Any] = ("", None)
        #: Tasks whose outcomes were collected, but are not acknowledged: brokers keep them.
        self._kept: dict[str, None] = {}
        self._acknowledged: list[str] = []
        #: Tasks to end early, and whether by force.
        self._stopped: dict[str, bool] = {}
        #: The broker that it uses; empty before it uses one.
        self.broker = broker
        #: Whether other brokers may have unknown tasks of an earlier life.
        self._is_heir = bool(broker)
        #: The life of the broker that knows the tasks; empty before it was asked.
        self._life = ""
        self._lost_at: float | None = None
        #: Extra seconds that calls may take, for large outcomes and slow disks.
        self._slack_s = 0.0
        #: Brokers that may still have tasks of this model.
        self._left: set[str] = set()
        #: When it sends its next heartbeat.
        self.beat_at = 0.0
        self.load = Load()
        self.unknown_kinds: Sequence[str] = ()

    @property
    def outstanding(self) -> dict[str, TaskSubmission]:
        with self._lock:
            return dict(self._outstanding)

    @property
    def workers(self) -> int:
        return max(self._presence.view.workers, self.load.workers)

    @property
    def running(self) -> int:
        return sum(list(self._running.values()))

    def __len__(self) -> int:
        return len(self._outstanding)

    def add(self, submissions: Iterable[TaskSubmission]) -> None:
        with self._lock:
            for each in submissions:
                self._outstanding[each.id] = each
                self._unsent[each.id] = None

    def stop(self, ids: Iterable[str], *, kill: bool = False) -> None:
        """Ends tasks early, or by force (`kill`); their outcomes come as usual."""
        with self._lock:
            self._stopped |= {each: kill or self._stopped.get(each, False) for each in ids}

    def acknowledge(self, ids: Iterable[str]) -> None:
        with self._lock:
            for each in ids:
                self._kept.pop(each, None)
                self._acknowledged.append(each)

    def cancel(self, ids: Iterable[str]) -> None:
        """Gives tasks up: they have no outcome."""
        with self._lock:
            given_up = [each for each in ids if self._outstanding.pop(each, None) is not None]
            for each in given_up:
                self._unsent.pop(each, None)
                self._running.pop(each, None)
        self._have_forgotten(given_up)

    def _have_forgotten(self, ids: Sequence[str]) -> None:
        if ids:
            with contextlib.suppress(*LOST, KeyError):
                self._client().cancel(self._model, ids)

    def send(self) -> bool:
        """Sends what was added; returns whether all of it was accepted."""
        while self._unsent:
            if not self._is_ready():
                return False
            with self._lock:
                ids = itertools.islice(self._unsent, _MOST_AT_ONCE)
                part = first_of(sorted((self._outstanding[each] for each in ids), key=_is_large))
            if not part:
                break  # `_ready` has sent all
            try:
                count = self._submit(part)
            except (*LOST, KeyError) as error:  # the other thread may have left the broker
                self._note_loss(error)
                return False
            if count is None:
                return False  # the next call notes when it has arrived
            self._lost_at = None
            with self._lock:
                for each in part[:count]:
                    self._unsent.pop(each.id, None)
                    self._renewed.discard(each.id)
                given_up = [each.id for each in part if each.id not in self._outstanding]
            self._have_forgotten(given_up)  # meanwhile
            if count < len(part):
                return False  # there is no room now
        return True

    def _submit(self, part: Sequence[TaskSubmission]) -> int | None:
        """Returns how many tasks the broker has accepted; None: a large one is on its way."""
        accepted: int
        if not _is_large(part[0]):
            accepted = self._client(transfer_s(part)).submit(self._model, part)
            return accepted
        key, call = self._large
        if key != part[0].id:
            # No limit of time: other calls find out if the broker is lost.
            client = courier.with_timeout(self._presence.client(self.broker), None)
            call = client.futures.submit(self._model, part)
            self._large = part[0].id, call
        if not call.done():
            return None
        self._large = ("", None)
        accepted = call.result()
        return accepted

    def collect(self, wait_s: float) -> tuple[list[TaskOutcome], list[TaskProgress]]:
        """Waits for outcomes of outstanding tasks; returns each once, and progress.

        Acknowledge each once it is saved, so that a restart does not need it again.
        """
        self.begun = []
        self._beat()
        late = self._revisit() if self._left else []
        if late or not self._is_ready():
            time.sleep(0.0 if late else min(wait_s, RETRY_S))
            return late, []
        with self._lock:
            acknowledged, self._acknowledged = self._acknowledged, []
            stopped, self._stopped = self._stopped, {}
        try:
            found: Collected = self._client(wait_s).collect(
                self._model, self._session, acknowledged, stopped, wait_s
            )
        except (*LOST, KeyError) as error:
            with self._lock:
                self._acknowledged = acknowledged + self._acknowledged
                self._stopped = {**stopped, **self._stopped}
            self._note_loss(error)
            return [], []
        self._lost_at = None
        self._slack_s /= 2
        self.load, self.unknown_kinds = found.load, found.unknown_kinds
        if found.life != self._life:
            self._life = ""  # not the life that was asked for its tasks
        progress = [each for each in found.progress if each.id in self._outstanding]
        outcomes = [each for each in found.outcomes if self._take(each)]
        with self._lock:
            for each, is_running in found.begun:
                if each in self._outstanding and (is_running or each in self._running):
                    self.begun += [each] if each not in self._running else []
                    self._running[each] = is_running
        return outcomes, progress

    def _take(self, outcome: TaskOutcome) -> bool:
        """Takes an outcome; returns whether it is the first one of its task."""
        with self._lock:
            self._unsent.pop(outcome.id, None)
            self._running.pop(outcome.id, None)
            if self._outstanding.pop(outcome.id, None) is not None:
                self._kept[outcome.id] = None
                return True
            if outcome.id in self._kept:
                return False
            self._acknowledged.append(outcome.id)
            return False

    # The choice of a broker.

    def _client(self, wait_s: float = 0.0) -> Any:
        client = self._presence.client(self.broker)
        return courier.with_timeout(client, wait_s + self._slack_s + 2 * self._timing.beat_s)

    def _is_ready(self) -> bool:
        """Finds a broker, and compares the outstanding tasks with it; returns whether it did."""
        if self._life:
            return True
        with self._asking:
            return bool(self._life) or (self._has_asked() and self.send())

    def _has_asked(self) -> bool:
        with self._lock:
            if not self.broker:
                self.broker = self._presence.choose(avoid=list(self._left))
            if not self.broker:
                return False
            known = [*self._outstanding, *self._kept]  # accepted perhaps, without an answer
        try:
            awaited = [each for each in known if each in self._renewed]
            life, missing = self._client().resume(self._model, known, awaited)
        except (*LOST, KeyError) as error:
            self._note_loss(error)
            return False
        with self._lock:
            self._life, self._lost_at = life, None
            self._left.discard(self.broker)
            asked, lost = set(known), set(missing)
            wanted = lost.union(awaited).intersection(self._outstanding)
            again = [each for each in known if each in wanted]
            # First those that it has: until they come again, they wait, and take up its room.
            again.sort(key=lost.__contains__)
            added = [each for each in self._unsent if each not in asked]  # meanwhile
            self._unsent = dict.fromkeys([*again, *added])
        return True

    def _note_loss(self, error: Exception) -> None:
        now = time.monotonic()
        if isinstance(error, courier.CallTimeoutError):
            self._slack_s = longer(self._slack_s)
        with self._lock:
            self._life = ""
            self._session = os.urandom(16).hex()  # its last answers may not have arrived
            self._running = dict.fromkeys(self._running, False)  # it reports all of them again
            if self._lost_at is None:
                self._lost_at = now
            elif now - self._lost_at > self._timing.patience_s:
                self._left.add(self.broker)
                self.broker, self._lost_at, self._large = "", None, ("", None)

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self.beat_at:
            answers = self._presence.beat(self.broker)
            # Asks a lost one rarely: it takes time, and nothing waits for the answer.
            pause_s = self._timing.beat_s * (1 if answers else _PAUSES)
            self.beat_at = time.monotonic() + pause_s
            if self._is_heir and self._presence.view.brokers:
                self._is_heir = False
                self._left.update(self._presence.view.brokers)

    def _revisit(self) -> list[TaskOutcome]:
        """Collects from brokers that were left and are back, and makes them forget the rest."""
        found: list[TaskOutcome] = []
        known = self._presence.view.brokers
        for name in [each for each in self._left if each in known and each != self.broker]:
            client = courier.with_timeout(self._presence.client(name), self._timing.beat_s)
            with contextlib.suppress(*LOST):
                session = os.urandom(16).hex()  # the answer to an earlier call may be lost
                kept: Collected = client.collect(self._model, session, (), {}, 0.0)
                found += [each for each in kept.outcomes if self._take(each)]
                client.resume(self._model, ())
                self._left.discard(name)
        self._have_forgotten([each.id for each in found])
        return found


def _is_large(submission: TaskSubmission) -> bool:
    return len(submission.payload) > MOST_BYTES
