"""Generators, environments and rewards as nodes: code of the user, leased by the buffer."""

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import courier
import launchpad_lite as lp
from courier import lowlevel
from launchpad_lite.parts.threads import start_thread
from launchpad_lite.process.activity import activities
from launchpad_lite.process.forcing import ForcedExit
from launchpad_lite.rollouts._buffer import ENVIRONMENT, GENERATOR, REWARD, MemberLife, RolloutOrder
from launchpad_lite.rollouts._patience import SILENT_S, Lateness, call_patiently
from launchpad_lite.rollouts.errors import EnvironmentTakenError
from launchpad_lite.rollouts.results import Rollout
from launchpad_lite.rollouts.weights import WeightsClient

#: A class and its arguments. Not `lp.Deferred`, which would be made before the node itself.
MadeFrom = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

#: The argument of calls of environments that has the number of the lease.
LEASE = "launchpad lease"
#: Seconds for which a call waits for work, and between two heartbeats.
_POLL_S, _BEAT_S = 5.0, 1.0
#: Seconds after which the buffer is told what a rollout waits for.
_LONG_S = 2.0
_MOST_TEXT = 4000
#: What a heartbeat may meet: the next one may reach the buffer, or the program stops.
_PASSES = (courier.ServerGoneError, courier.CallTimeoutError, courier.CallCancelledError)

_LOGGER = logging.getLogger(__name__)


class ReturningNode(lp.CourierNode[Any]):
    """A node that starts again when it is lost, unless the launch says otherwise.

    Ten times a minute: one that is killed now and then is no reason to end a program that can do
    without it for a while, and a constructor that always raises still ends it soon.
    """

    _restart = lp.RestartPolicy("on_failure", max_restarts=10, window_s=60.0, max_backoff_s=1.0)

    def to_executables(self, context: Any) -> Sequence[Any]:
        """Returns one task."""
        tasks = super().to_executables(context)
        return [dataclasses.replace(task, restart=self._restart) for task in tasks]


class _MemberNode:
    """Shows that this node lives, until the program stops; starts it again if it hangs.

    It has no `run`: a program ends when its trainer has ended.
    """

    def __init__(self, buffer: Any, role: str) -> None:
        self._buffer = courier.with_timeout(buffer, SILENT_S)
        #: 0 until the user's object is there: the buffer only hears that the last life is over.
        self._threads = 0
        self._who = MemberLife(lp.current_node().name, lp.restart_count(), role)
        #: Whether this node may end its process, and comes back then.
        self._may_exit = (
            lp.current_node().restarts and threading.current_thread() is threading.main_thread()
        )
        #: By token, the thread that works at it, and since when.
        self._held: dict[str, tuple[int, float]] = {}
        self._ends = threading.Event()
        lp.register_stop_handler(self._ends.set)
        start_thread(self._beat)

    def _beat(self) -> None:
        lateness = Lateness(_LOGGER)
        while not self._ends.is_set():
            now = time.monotonic()
            doing = {
                token: _doing(ident) if now - began_at > _LONG_S else ""
                for token, (ident, began_at) in self._held.copy().items()
            }
            with contextlib.suppress(*_PASSES):
                hangs = self._buffer.beat(self._who, doing, self._threads)
                if hangs and self._may_exit:
                    os.write(2, b"it hangs, and starts again\n")  # streams may be locked
                    os._exit(os.EX_TEMPFAIL)
                if hangs:
                    name = self._who.name
                    lateness.warn(f"{name} hangs; as a process that restarts it would start again")
            self._ends.wait(_BEAT_S)
        with contextlib.suppress(courier.CourierError):  # others go on with what it has
            self._buffer.beat(self._who._replace(life=self._who.life + 1), {}, 0)

    def make(self, one: MadeFrom, threads: int = 1) -> Any:
        """Returns the user's object, once the buffer knows of this node, or it is to stop."""
        constructor, args, kwargs = one
        try:
            made = lp.Deferred(constructor, *args, **kwargs).dereference()
        except BaseException:
            self._ends.set()  # a thread outlives its node
            raise
        self._threads = threads
        call_patiently(self._buffer.beat, self._who, {}, self._threads, stop=self._ends)
        return made


def serve_environment(buffer: Any, environment: MadeFrom) -> Any:
    """Returns an environment, once the buffer knows that its node lives.

    Before, a rollout that was made with the life before would go on with this one.
    """
    return _LeasedEnvironment(_MemberNode(buffer, ENVIRONMENT).make(environment))


class _LeasedEnvironment:
    """An environment for one rollout after the other: refuses calls of those that had it before.

    A generator that was silent for long may still call it for a rollout that others make again.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._name = lp.current_node().name
        #: The newest lease that has called, and which calls run, by their lease.
        self._newest, self._running = 0, list[int]()
        self._changed = threading.Condition()

    def __dir__(self) -> list[str]:
        return dir(self._environment)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._environment, name)
        is_method = callable(method) and not isinstance(method, courier.Client)
        return self._guarded(method) if is_method else method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the environment itself; served if `dir` lists it."""
        return self._guarded(self._environment)(*args, **kwargs)

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        run = getattr(method, "__courier_call__", method)  # a batched one, which answers later

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            lease = kwargs.pop(LEASE, self._newest)
            with self._changed:
                self._newest = max(self._newest, lease)
                # What the one before has called may still run.
                while lease == self._newest and min(self._running, default=lease) < lease:
                    self._changed.wait()
                if lease < self._newest:
                    raise EnvironmentTakenError(
                        f"{self._name}: lease {lease} is over, and lease {self._newest} has it: the rollout "
                        "was given up, and is made again"
                    )
                self._running.append(lease)
            try:
                return run(*args, **kwargs)
            finally:
                with self._changed:
                    self._running.remove(lease)
                    self._changed.notify_all()

        return call


class GeneratorNode(_MemberNode):
    """Makes rollouts, in threads of its own."""

    _role = GENERATOR

    def __init__(
        self,
        buffer: Any,
        weights: WeightsClient,
        worker: MadeFrom,
        threads: int,
        environments: Mapping[str, Any],
        *,
        partial: bool,
        size_of: Callable[[Any], float] | None,
    ) -> None:
        super().__init__(buffer, self._role)
        self._give, self._add = buffer.give, buffer.add  # of any size
        self._partial = partial
        self._size_of = size_of or (lambda _: 0.0)
        self._weights = weights
        #: The user's object.
        self._worker = self.make(worker, threads)
        self._load = getattr(self._worker, "update_weights", None)
        self._environments = environments
        self._reading = threading.Lock()
        self._params: Any = None
        self._version = 0
        for _ in range(threads):
            start_thread(self._work)

    def _work(self) -> None:
        try:
            while not self._ends.is_set():
                found = call_patiently(self._buffer.take, self._who, _POLL_S, stop=self._ends)
                if found is not None:
                    self._work_at(*found)
        except courier.CallCancelledError:
            pass  # the program stops
        except courier.CourierError:
            if not self._ends.is_set():
                raise
            # else: as a thread it may go on for a while, and another program have the port

    def _work_at(self, order: RolloutOrder, prompt: bytes) -> None:
        self._held[order.token] = threading.get_ident(), time.monotonic()
        try:
            send = self._make(order, loaded(prompt))
        except ForcedExit:
            raise
        except BaseException as error:  # noqa: BLE001 - it may succeed elsewhere
            if not self._ends.is_set():  # else: as calls raise when the program stops
                text = lowlevel.shortened("".join(traceback.format_exception(error)), _MOST_TEXT)
                fault = _fault_of(error, order.environment)
                call_patiently(self._buffer.fail, order.token, text, fault, stop=self._ends)
        else:
            call_patiently(send, stop=self._ends)
        finally:
            del self._held[order.token]

    def _make(self, order: RolloutOrder, prompt: Any) -> Callable[[], Any]:
        """Makes what was ordered; returns a function that sends it."""
        began_at = time.monotonic()
        leased = []
        if order.environment:
            client = self._environments[order.environment]
            leased.append(lowlevel.with_arguments(client, **{LEASE: order.lease}))
        value: Any = []
        if self._partial:
            version, size = self._make_parts(order, prompt, *leased)
            if not version:
                return lambda: self._buffer.fail(order.token, "given up")  # lets go of it
        else:
            params, version = self._newest(order.version)
            made_now = self._worker.generate(prompt, params, *leased)
            value, size = courier.dumps(made_now), self._size_of(made_now)
        took_s = time.monotonic() - began_at
        made = Rollout(value, version, self._who.name, took_s, versions=[version])
        return lambda: self._give(order.token, made, size)

    def _make_parts(self, order: RolloutOrder, prompt: Any, *leased: Any) -> tuple[int, float]:
        """Sends parts until there is none left; returns the last version, 0 if it was given up, and the size."""
        parts: list[Any] = loaded(list(order.parts))
        size = 0.0
        wanted: int | None = order.version
        while wanted:
            params, version = self._newest(wanted)
            for part in self._worker.generate(prompt, params, *leased, list(parts)):
                sent = order.token, len(parts), courier.dumps(part), version
                parts.append(part)
                size += self._size_of(part)
                wanted = call_patiently(self._add, *sent, stop=self._ends)
                if not wanted or wanted > version:
                    break  # others go on, or this one does with newer weights
            else:
                return version, size
        return 0, size

    def _newest(self, wanted: int) -> tuple[Any, int]:
        """Returns weights that are new enough; all threads share them."""
        with self._reading:
            if self._version < wanted:
                params, version = self._weights.get(self._version, known=self._params)
                if self._load is not None:
                    self._load(params, version)
                self._params, self._version = params, version
            return self._params, self._version


class RewardNode(GeneratorNode):
    """Judges rollouts, in threads of its own."""

    _role = REWARD

    def _make(self, order: RolloutOrder, prompt: Any) -> Callable[[], Any]:
        value = courier.dumps(self._worker.reward(prompt, loaded(order.draft)))
        return lambda: self._buffer.score(order.token, value)


def loaded(payload: Any) -> Any:
    """Returns the value of a payload, or a list of the values of parts; None if there is none."""
    if isinstance(payload, list):
        return list(map(pickle.loads, payload))
    return None if payload is None else pickle.loads(payload)


def _fault_of(error: BaseException, environment: str) -> str:
    """Returns the fault of an environment, or of another node, as `RolloutBuffer.fail` takes it."""
    if isinstance(error, courier.ServerGoneError):
        return "lost"
    is_late = isinstance(error, courier.CallTimeoutError) and environment
    return "hangs" if is_late and str(error).startswith(environment) else ""


def _doing(ident: int) -> str:
    """Returns what a thread does now, for people."""
    for each in activities({}, [ident]):
        if each.server:
            return f"waits for {each.server}.{each.method}"
        return f"is at {each.place}"
    return ""
