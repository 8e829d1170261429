"""One client for several servers that do the same."""

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import itertools
import math
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from courier import _clock
from courier._client import connection_of
from courier._future import CallFuture
from courier._lane import PendingCall
from courier._timing import DEFAULT, Timing
from courier.errors import (
    CallTimeoutError,
    CourierError,
    ServerBusyError,
    ServerLostError,
    ServerUnreachableError,
)

if TYPE_CHECKING:
    from courier._connection import Connection

#: The pause when none could be reached.
_PAUSE_S = 0.05

PoolChoice = Literal["round_robin", "least_loaded"]


class _Member:
    """One of the servers."""

    def __init__(self, client: object, place: int, timing: Timing) -> None:
        self._own = connection_of(client)
        # To find out at once that a server is away, and to ask another one.
        self.connection: Connection = self._own.impatient()
        self.name = self._own.options.address
        # Of its place, not of its address: that differs from host to host behind tunnels, and from
        # run to run, when a server has got its state back.
        self._digest = hashlib.blake2b(str(place).encode()).digest()
        self._timing = timing
        #: Calls on their way.
        self.load = 0
        self.down_until = 0.0
        self._made_at = time.monotonic()
        #: When it answered last; -inf is never.
        self._answered_at = -math.inf

    @property
    def is_starting(self) -> bool:
        """Whether it may be about to come for the first time."""
        has_answered = self._answered_at > -math.inf
        starts_until = self._made_at + self._timing.pool_start_s
        return self.waits and not has_answered and time.monotonic() < starts_until

    @property
    def waits(self) -> bool:
        """Whether the client of this server would wait until it is there."""
        return self._own.options.wait_for_ready

    @property
    def timeout_s(self) -> float:
        """Seconds that a call of this client may take."""
        timeout_s = self._own.options.timeout_s
        return math.inf if timeout_s is None else timeout_s

    def check_calling(self, method: str) -> None:
        """Raises CallCancelledError if no call may begin here."""
        self._own.check_calling(method)

    def weight(self, key: bytes) -> bytes:
        """Returns how much this server is responsible for a key: the greatest value wins."""
        return hashlib.blake2b(key, key=self._digest, digest_size=16).digest()

    def mark_there(self) -> None:
        """Takes note that it answered just now."""
        self._answered_at = time.monotonic()
        # Calls that did not reach it a moment ago, and wait, ask it again.
        self.down_until = 0.0

    def mark_down(self, asked_at: float) -> None:
        """Takes note that it was not reached, unless it has answered others since it was asked."""
        if self._answered_at <= asked_at:
            self.down_until = time.monotonic() + self._timing.pool_down_s


class _Choice(NamedTuple):
    """Who is asked.

    Attributes:
        order: Returns all servers, the one to ask first; then those to ask in its place.
        is_keyed: Whether another one is asked only if the first is lost; not if it is busy, or
            about to start.
    """

    order: Callable[[], "Sequence[_Member]"]
    is_keyed: bool = False


class Pool:
    """Calls servers that do the same as if they were one.

    `pool.m(...)` and `pool.futures.m(...)` call one of them, chosen as was asked for;
    `pool.by_key(key).m(...)` always the same one for the same key, as long as it can be reached (the
    same place in the list, whatever its address: pools of the same servers list them in the same
    order); `pool.all.m(...)` and `pool.futures.all.m(...)` call all, and give a list in their order.

    A server that cannot be reached is passed over for a second, and the call goes to another one:
    it was not run. So does one that a busy server did not take, except for `by_key`, which also waits
    (30 s at most) for a server that was never there, as it may be starting. A call that
    was on its way when its server was lost raises ServerLostError, as with any client (and is not
    repeated, even if its method is idempotent); the next one goes elsewhere. If none can be
    reached, calls wait as the clients would have, for as long as one of them would. What is done
    to the clients, like `close`, holds for the pool. Thread-safe.

    Methods that are called `all`, `by_key`, `clients` or `futures` cannot be called through it.

    Can be pickled; where it is loaded, it chooses by itself.

    Example:
        pool = courier.Pool([courier.Client(address, secret=secret) for address in addresses])
        pool.get("a")              # of one server, in turns
        pool.futures.all.reload()  # of all: a list of futures
    """

    def __init__(
        self,
        clients: Iterable[Any],
        *,
        choose: PoolChoice = "round_robin",
        timing: Timing = DEFAULT,
    ) -> None:
        """Makes a pool; does not connect yet.

        Args:
            clients: Courier clients, one per server.
            choose: "round_robin" takes turns; "least_loaded" prefers who has the fewest calls of
                this pool on their way.
            timing: For how long servers that are away are passed over, or waited for.

        Raises:
            TypeError: One of them is no courier client.
            ValueError: There are none, or `choose` is unknown.
        """
        #: One per server, in their order.
        self.clients: list[Any] = list(clients)
        if not self.clients:
            raise ValueError("a pool needs at least one server")
        if choose not in ("round_robin", "least_loaded"):
            raise ValueError(f"choose is 'round_robin' or 'least_loaded', not {choose!r}")
        for client in self.clients:
            connection_of(client)
        self._choose: PoolChoice = choose
        self._timing = timing
        self._members = [
            _Member(client, place, timing) for place, client in enumerate(self.clients)
        ]
        self._turns = itertools.count()
        self._lock = threading.Lock()
        _pools.add(self)

    @property
    def futures(self) -> "_PoolView":
        """The same methods, each returning a `concurrent.futures.Future`."""
        return _PoolView(self, _Choice(self._order), blocking=False)

    @property
    def all(self) -> "_AllView":
        """The methods of all servers, each returning the list of what they return."""
        return _AllView(self, blocking=True)

    def by_key(self, key: object) -> "_PoolView":
        """The methods of the server that is responsible for a key.

        Args:
            key: Anything that can be pickled; the same in every process if its pickle is.

        Raises:
            Exception: Whatever pickling the key raises.
        """
        data = _bytes_of(key)
        choice = _Choice(lambda: self._order_of(data), is_keyed=True)
        return _PoolView(self, choice, blocking=True)

    # No public methods but these: they would hide those of the servers.

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _PoolView(self, _Choice(self._order), blocking=True).__getattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods()})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(_Choice(self._order), "__call__", args, kwargs)

    def __len__(self) -> int:
        return len(self._members)

    def __reduce__(self) -> Any:
        return _make_pool, (self.clients, self._choose, self._timing)

    def __repr__(self) -> str:
        return f"courier.Pool({', '.join(member.name for member in self._members)})"

    # What they have

    def _methods(self) -> frozenset[str]:
        there, away = self._by_presence(self._members)
        return (there or away)[0].connection.methods()

    def _check(self, name: str) -> None:
        if all(member.connection.lacks(name) for member in self._members):
            raise self._members[0].connection.unknown(name)

    # Who is asked

    def _order(self) -> Sequence[_Member]:
        # Turns are taken among those that are there: otherwise the one after a lost server would
        # have its calls besides its own.
        there, away = self._by_presence(self._members)
        if not there:
            there, away = away, there
        there = _turned(there, next(self._turns))
        if self._choose == "least_loaded":
            there.sort(key=lambda member: member.load)
        return [*there, *away]

    def _order_of(self, key: bytes) -> Sequence[_Member]:
        # Rendezvous hashing (Thaler, Ravishankar 1998): when one server is away, only its own keys
        # move.
        ranked = sorted(self._members, key=lambda member: member.weight(key), reverse=True)
        away = [each for each in self._by_presence(ranked)[1] if not each.is_starting]
        return [*(member for member in ranked if member not in away), *away]

    @staticmethod
    def _by_presence(members: Sequence[_Member]) -> tuple[list[_Member], list[_Member]]:
        """Returns those that seem to be there, and those to ask last, as they may be back."""
        now = time.monotonic()
        there = [member for member in members if member.down_until <= now]
        return there, [member for member in members if member not in there]

    # Calls

    def _call(
        self, choice: _Choice, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls one server, the first in order that takes the call, and waits."""
        return _Call(self, choice, method, args, kwargs).run()

    def _start(
        self, choice: _Choice, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallFuture:
        """Calls one server, the first in order that takes the call; returns at once."""
        call = _Call(self, choice, method, args, kwargs)
        member = choice.order()[0]
        return _PoolFuture(call, member, call.ask(member, blocking=False))

    @contextlib.contextmanager
    def _counted(self, member: _Member) -> Iterator[None]:
        self._count(member, 1)
        try:
            yield
        finally:
            self._count(member, -1)

    def _count(self, member: _Member, change: int) -> None:
        """Takes note of a call that begins or ends."""
        with self._lock:
            member.load += change

    def _survive_fork(self) -> None:
        # Another thread of the parent may hold the lock; its calls are not ours.
        self._lock = threading.Lock()
        for member in self._members:
            member.load = 0


_pools: "weakref.WeakSet[Pool]" = weakref.WeakSet()


def _survive_fork() -> None:
    for pool in list(_pools):
        pool._survive_fork()


os.register_at_fork(after_in_child=_survive_fork)


def _make_pool(clients: list[Any], choose: PoolChoice, timing: Timing) -> Pool:
    return Pool(clients, choose=choose, timing=timing)


def _turned(members: list[_Member], turn: int) -> list[_Member]:
    first = turn % len(members)
    return members[first:] + members[:first]


def _bytes_of(key: object) -> bytes:
    if isinstance(key, str):
        return key.encode(errors="surrogatepass")
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    # Without references: equal keys would differ by whether equal parts are the same object.
    pickler.fast = True
    pickler.dump(key)
    return buffer.getvalue()


class _Call:
    """One call, until a server takes it or it is given up."""

    def __init__(
        self,
        pool: Pool,
        choice: _Choice,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.pool = pool
        self.method = method
        self._choice = choice
        self._args = args
        self._kwargs = kwargs
        self._began_at = time.monotonic()
        self._asked_at = self._began_at
        self._has_begun = False

    def ask(self, member: _Member, *, blocking: bool) -> PendingCall:
        """Sends the call to one server."""
        if not self._has_begun:
            # Only here, in the thread and context of the caller: one that began continues.
            member.check_calling(self.method)
            self._has_begun = True
        self._asked_at = time.monotonic()
        left_s = self._left_s(member)
        return member.connection.attempt(
            self.method,
            self._args,
            self._kwargs,
            None if left_s == math.inf else max(0.0, left_s),
            blocking=blocking,
        )

    def refusal(self, pending: PendingCall, member: _Member) -> CourierError | None:
        """Waits for a server; returns why the call was not run, if another one may be asked."""
        try:
            pending.wait()
        except ServerUnreachableError as error:
            member.mark_down(self._asked_at)
            return error
        except ServerBusyError as error:
            member.mark_there()
            return None if self._choice.is_keyed else error
        except ServerLostError:
            member.mark_there()
            member.mark_down(math.inf)
        except CourierError:
            pass
        else:
            member.mark_there()
        return None  # the code that takes the answer raises it

    def run(self) -> Any:
        """Asks one server after the other, and waits; returns or raises what came of it."""
        attempts = self.attempts(blocking=True)
        while True:
            try:
                step = next(attempts)
            except StopIteration as end:
                return end.value
            if isinstance(step, float):
                time.sleep(step)

    def attempts(self, *, blocking: bool) -> Generator[PendingCall | float, None, Any]:
        """Asks one server after the other; returns or raises what came of it.

        Args:
            blocking: Whether the caller waits.

        Yields:
            What to wait for before it continues: a call that was sent, or some seconds.
        """
        while True:
            refusals: list[CourierError] = []
            for member in self._choice.order():
                if refusals and self._left_s(member) <= 0:
                    continue
                # Before it is asked: the answer to another call may come while this one is refused.
                is_starting = member.is_starting
                with self.pool._counted(member):
                    pending = self.ask(member, blocking=blocking)
                    yield pending
                    refusal = self.refusal(pending, member)
                    if refusal is None:
                        return member.connection.finish(pending, self.method)
                    refusals.append(refusal)
                if self._choice.is_keyed and is_starting:
                    break
            yield self._pause_s(refusals)

    def _pause_s(self, refusals: Sequence[CourierError]) -> float:
        """Returns how long to wait if a client would wait for its server; raises otherwise."""
        waiting = [member for member in self.pool._members if member.waits]
        busy = next((error for error in refusals if isinstance(error, ServerBusyError)), None)
        if busy is not None or not waiting:
            raise busy or refusals[0]
        left_s = max(map(self._left_s, waiting))
        if left_s <= 0:
            raise CallTimeoutError(
                f"{self.pool!r}: {self.method}: no answer in time; nothing was run"
            ) from refusals[0]
        return min(_PAUSE_S, left_s)

    def _left_s(self, member: _Member) -> float:
        return self._began_at + member.timeout_s - time.monotonic()


class _PoolFuture(CallFuture):
    """A call to one server; continues with another one if it was not run."""

    _attempts: Generator[PendingCall | float, None, Any]

    def __init__(self, call: _Call, member: _Member, pending: PendingCall) -> None:
        self._call = call
        self._member = member
        call.pool._count(member, 1)
        super().__init__(member.connection, pending, call.method)

    def follow(self, pending: PendingCall) -> None:
        """Takes note that the call continues as this one."""
        try:
            # In one step, as `cancel` may take it out at any time.
            self._pending[0] = pending
        except IndexError:
            pending.cancel()

    def _settle(self, pending: PendingCall) -> None:
        self._call.pool._count(self._member, -1)
        if self._call.refusal(pending, self._member) is None:
            super()._settle(pending)
        else:
            self._attempts = self._call.attempts(blocking=False)
            self._go_on_aside()

    def _go_on_aside(self, _: object = None) -> None:
        # Asking another server may block, and this thread reads all answers.
        self._connection.run_aside(self._go_on)

    def _go_on(self) -> None:
        """Takes the next step. No thread waits for what comes of it: there may be thousands."""
        try:
            if self.cancelled():
                self._attempts.close()
                return
            step = next(self._attempts)
            if isinstance(step, float):
                _clock.call_at(time.monotonic() + step, self._go_on_aside)
            else:
                self.follow(step)
                step.when_done(self._go_on_aside)
                step.hurry()
            return
        except StopIteration as end:
            outcome = functools.partial(self.set_result, end.value)
        except BaseException as error:  # noqa: BLE001 - the future gets it
            outcome = functools.partial(self.set_exception, error)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
            outcome()
        self._pending.clear()


class _PoolView:
    """One way to choose, and to call, a server; each attribute is a method."""

    def __init__(self, pool: Pool, choice: _Choice, *, blocking: bool) -> None:
        self._pool = pool
        self._choice = choice
        self._blocking = blocking

    @property
    def futures(self) -> "_PoolView":
        """The same methods, each returning a future."""
        return _PoolView(self._pool, self._choice, blocking=False)

    @property
    def all(self) -> "_AllView":
        """The methods of all servers."""
        return _AllView(self._pool, blocking=self._blocking)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._pool._methods()})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("__call__")(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        _check_public(name)
        self._pool._check(name)
        return self._method(name)

    def _method(self, name: str) -> Callable[..., Any]:
        call = self._pool._call if self._blocking else self._pool._start

        def method(*args: Any, **kwargs: Any) -> Any:
            return call(self._choice, name, args, kwargs)

        method.__name__ = name
        return method


class _AllView:
    """The methods of all servers."""

    def __init__(self, pool: Pool, *, blocking: bool) -> None:
        self._pool = pool
        self._blocking = blocking

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._pool._methods()})

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._call("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        _check_public(name)
        self._pool._check(name)

        def method(*args: Any, **kwargs: Any) -> list[Any]:
            return self._call(name, args, kwargs)

        method.__name__ = name
        return method

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        futures = list[CallFuture]()
        try:
            for client in self._pool.clients:
                connection = connection_of(client)
                pending = connection.submit(method, args, kwargs, blocking=False)
                futures.append(CallFuture(connection, pending, method))
            return [future.result() for future in futures] if self._blocking else list(futures)
        except BaseException as error:
            for future in futures:
                if isinstance(error, Exception):
                    future.note_read()  # one failure is raised, and stands for the others
                else:  # a Ctrl-C: no caller is going to wait
                    future.cancel()
            raise


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise AttributeError(f"{name!r} is private and cannot be called from afar")
