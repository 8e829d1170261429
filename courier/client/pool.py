"""One client for several servers that do the same."""

import concurrent.futures
import contextlib
import copy
import functools
import hashlib
import io
import itertools
import math
import pickle
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from courier._timing import DEFAULT, Timing
from courier.calls.pending import PendingCall
from courier.client.client import (
    Aio,
    AioCall,
    AioFuture,
    Callee,
    Client,
    Futures,
    answer_to,
    connection_of,
)
from courier.client.future import CallFuture
from courier.errors import (
    CallTimeoutError,
    CourierError,
    ServerBusyError,
    ServerLostError,
    ServerUnreachableError,
)
from courier.threads import clock
from courier.threads.forks import survive
from courier.threads.locks import Lock

if TYPE_CHECKING:
    from courier.client.connection import Connection

#: The pause when none could be reached.
_PAUSE_S = 0.05

T = TypeVar("T")

PoolChoice = Literal["round_robin", "least_loaded"]


class _PoolMember:
    def __init__(self, client: object, place: int, timing: Timing) -> None:
        self.connection: Connection = connection_of(client)
        self.name = self.connection.lane.options.address
        # From its place in the list: its address differs from host to host behind tunnels, and from
        # run to run.
        self._digest = hashlib.blake2b(str(place).encode()).digest()
        self._timing = timing
        self.load = 0
        self.down_until = 0.0
        self._made_at = time.monotonic()
        #: When it answered last; -inf is never.
        self._answered_at = -math.inf

    @property
    def is_starting(self) -> bool:
        has_answered = self._answered_at > -math.inf
        starts_until = self._made_at + self._timing.pool_start_s
        return self.waits and not has_answered and time.monotonic() < starts_until

    @property
    def waits(self) -> bool:
        return self.connection.lane.options.wait_for_ready

    @property
    def timeout_s(self) -> float:
        timeout_s = self.connection.timeout_s
        return math.inf if timeout_s is None else timeout_s

    def weight(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._digest, digest_size=16).digest()

    def mark_there(self) -> None:
        self._answered_at = time.monotonic()
        # Waiting calls that did not reach it a moment ago ask it again.
        self.down_until = 0.0

    def mark_down(self, asked_at: float) -> None:
        """Notes that it was not reached, unless it has answered others meanwhile."""
        if self._answered_at <= asked_at:
            self.down_until = time.monotonic() + self._timing.pool_down_s


class _Methods:
    """Each public attribute is a method of the servers of a pool."""

    _pool: "Pool[Any]"

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._pool._methods()})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is private and cannot be called from afar")
        self._pool._check(name)
        return _PoolMethod(self, name)


class _PoolMethod(Callee):
    """A method of the servers of a pool, called in the way of the view it came from."""

    def __init__(self, view: _Methods, name: str) -> None:
        self._view = view
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._view._call(self.__name__, args, kwargs)

    def _called(self, way: type[Futures | Aio]) -> Callable[..., Any]:
        if not isinstance(self._view, _PoolView):
            raise TypeError(
                f"{self.__name__} of all servers: call pool.futures.all.{self.__name__}"
            )
        return _PoolMethod(self._view._called(way), self.__name__)


class _PoolView(_Methods, Callee):
    """A way to choose a server and to call it."""

    def __init__(
        self, pool: "Pool[Any]", key: bytes | None, way: type[Client | Futures | Aio]
    ) -> None:
        self._pool = pool
        self._key = key
        self._way = way

    @property
    def futures(self) -> "_PoolView":
        return self._called(Futures)

    @property
    def all(self) -> "_AllView":
        return _AllView(self._pool, blocking=self._way is Client)

    def _called(self, way: type[Futures | Aio]) -> "_PoolView":
        return _PoolView(self._pool, self._key, way)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = functools.partial(PoolCall, self._pool, self._key, method, args, kwargs)
        if self._way is Aio:
            return AioCall(answer_to(lambda: _AioPoolFuture(begin())), method)
        return begin().run() if self._way is Client else _PoolFuture(begin())


class Pool(_PoolView, Generic[T]):
    """Calls servers that do the same as if they were one.

    `pool.m(...)` and `pool.futures.m(...)` call one of them, by `choose`; `pool.by_key(key).m(...)`
    always the same one for the same key, as long as it can be reached (the same place in the list,
    whatever its address: pools of the same servers list them in the same order); `pool.all.m(...)`
    and `pool.futures.all.m(...)` call all, and give a list in their order.

    A server that cannot be reached is passed over for a second, and the call goes to another one:
    it was not run. So does a call that a busy server refused, except for `by_key`, which also waits
    (30 s at most) for a server that was never there, as it may be starting. A call in flight when
    its server was lost raises ServerLostError, as with any client (and is not repeated, even if its
    method is idempotent); the next one goes elsewhere. If none can be reached, calls wait as long
    as one of the clients would. Operations on the clients, like `close`, hold for the pool.
    Thread-safe.

    Methods that are called `all`, `by_key`, `clients` or `futures` cannot be called through it.

    Can be pickled; where it is loaded, it chooses by itself.

    Example:
        pool = courier.Pool([courier.Client(address, secret=secret) for address in addresses])
        pool.get("a")              # of one server, in turns
        pool.futures.all.reload()  # of all: a list of futures
    """

    def __init__(
        self, clients: Iterable[T], *, choose: PoolChoice = "round_robin", timing: Timing = DEFAULT
    ) -> None:
        """Makes a pool; does not connect yet.

        Args:
            clients: Courier clients, one per server.
            choose: "round_robin" takes turns; "least_loaded" prefers the server with the fewest
                calls of this pool in flight.
            timing: How long servers that are away are passed over, or waited for.

        Raises:
            TypeError: One of them is no courier client.
            ValueError: There are none, or `choose` is unknown.
        """
        #: One per server, in their order.
        self.clients: list[T] = list(clients)
        if not self.clients:
            raise ValueError("a pool needs at least one server")
        if choose not in ("round_robin", "least_loaded"):
            raise ValueError(f"choose is 'round_robin' or 'least_loaded', not {choose!r}")
        self._choose: PoolChoice = choose
        self._timing = timing
        self._members = [
            _PoolMember(client, place, timing) for place, client in enumerate(self.clients)
        ]
        self._turns = itertools.count()
        self._lock = Lock()
        survive(self)

    # The pool itself is a view, too.
    _key = None
    _way = Client

    @property
    def _pool(self) -> "Pool[T]":  # type: ignore[override] # not an attribute, which would be a circle
        return self

    def by_key(self, key: object) -> T:
        """The methods of the server that is responsible for a key.

        Args:
            key: Anything that can be pickled; the same in every process if its pickle is.

        Raises:
            Exception: As pickle raises for the key.
        """
        return cast("T", _PoolView(self, _bytes_of(key), Client))

    # No public methods but these: they would hide those of the servers.

    def __len__(self) -> int:
        return len(self._members)

    def __reduce__(self) -> Any:
        make = functools.partial(Pool, choose=self._choose, timing=self._timing)
        return make, (self.clients,)

    def __repr__(self) -> str:
        return f"courier.Pool({', '.join(member.name for member in self._members)})"

    def _methods(self) -> frozenset[str]:
        there, away = self._by_presence(self._members)
        return (there or away)[0].connection.methods(waits=False)

    def _check(self, name: str) -> None:
        if all(member.connection.lacks(name, waits=False) for member in self._members):
            raise self._members[0].connection.unknown(name)

    def _order(self, key: bytes | None) -> Sequence[_PoolMember]:
        """Returns all servers, the one to ask first; then those to ask in its place."""
        if key is not None:
            return self._order_of(key)
        # Takes turns among reachable servers: otherwise the one after a lost server would get the
        # calls of both.
        there, away = self._by_presence(self._members)
        if not there:
            there, away = away, there
        first = next(self._turns) % len(there)
        there = there[first:] + there[:first]
        if self._choose == "least_loaded":
            there.sort(key=lambda member: member.load)
        return [*there, *away]

    def _order_of(self, key: bytes) -> Sequence[_PoolMember]:
        # Rendezvous hashing (Thaler, Ravishankar 1998): when one server is away, only its own keys
        # move.
        ranked = sorted(self._members, key=lambda member: member.weight(key), reverse=True)
        away = [each for each in self._by_presence(ranked)[1] if not each.is_starting]
        return [*(member for member in ranked if member not in away), *away]

    @staticmethod
    def _by_presence(members: Sequence[_PoolMember]) -> tuple[list[_PoolMember], list[_PoolMember]]:
        """Returns servers that seem to be reachable, and those to ask last, as they may be back."""
        now = time.monotonic()
        there = [member for member in members if member.down_until <= now]
        return there, [member for member in members if member not in there]

    def _count(self, member: _PoolMember, change: int) -> None:
        with self._lock:
            member.load += change

    def _survive_fork(self) -> None:
        # Another thread of the parent may hold the lock; its calls are not ours, also when they end.
        self._lock = Lock()
        self._members = [copy.copy(member) for member in self._members]
        for member in self._members:
            member.load = 0


def _bytes_of(key: object) -> bytes:
    if isinstance(key, str):
        return key.encode(errors="surrogatepass")
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    # Without references: else equal keys would differ if equal parts are the same object.
    pickler.fast = True
    pickler.dump(key)
    return buffer.getvalue()


class PoolCall:
    """One call, until a server accepts it or it gives up."""

    def __init__(
        self,
        pool: Pool[Any],
        key: bytes | None,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.pool = pool
        self.method = method
        #: With a key, asks another server only if the first is lost; not if it is busy or starting.
        self._key = key
        self._args = args
        self._kwargs = kwargs
        self._began_at = time.monotonic()
        self._has_begun = False
        #: Of the servers, the one that was asked last; when; and why others did not run the call.
        self.member: _PoolMember
        self._asked_at: float
        self._refusals: list[CourierError]

    def _ask(self, member: _PoolMember, *, blocking: bool) -> PendingCall:
        if not self._has_begun:
            # Checked only here, in the thread and context of the caller: a call that began
            # continues.
            member.connection.check_calling(self.method)
            self._has_begun = True
        self.member, self._asked_at = member, time.monotonic()
        left_s = self._left_s(member)
        # Does not wait, so that the pool learns at once that a server is away, and asks another
        # one.
        return member.connection.submit(
            self.method,
            self._args,
            self._kwargs,
            blocking=blocking,
            left_s=None if left_s == math.inf else max(0.0, left_s),
            waits=False,
        )

    def is_refused(self, pending: PendingCall) -> bool:
        """Waits for the server that was asked; returns whether another one is to be asked."""
        member = self.member
        refusal: CourierError | None = None
        try:
            pending.wait()
        except ServerUnreachableError as error:
            member.mark_down(self._asked_at)
            refusal = error
        except ServerBusyError as error:
            member.mark_there()
            refusal = error if self._key is None else None
        except ServerLostError:
            member.mark_there()
            member.mark_down(math.inf)
        except CourierError:
            pass
        else:
            member.mark_there()
        if refusal is None:
            return False  # reading the answer raises its error
        self._refusals.append(refusal.with_traceback(None))
        return True

    def run(self) -> Any:
        with contextlib.closing(self.attempts(blocking=True)) as attempts:
            while True:
                step = next(attempts)
                if isinstance(step, float):
                    time.sleep(step)
                elif not self.is_refused(step):
                    return self.member.connection.finish(step)

    def attempts(self, *, blocking: bool) -> Generator[PendingCall | float, None, None]:
        """Asks one server after the other; yields sent calls, or seconds to wait for.

        Goes on after a call that `is_refused`; ends when it is closed, or raises.
        """
        while True:
            self._refusals = []
            for member in self.pool._order(self._key):
                if self._refusals and self._left_s(member) <= 0:
                    continue
                # The time before the call: another answer may come while this one is refused.
                is_starting = member.is_starting
                self.pool._count(member, 1)
                try:
                    yield self._ask(member, blocking=blocking)
                finally:
                    self.pool._count(member, -1)
                if self._key is not None and is_starting:
                    break
            yield self._pause_s(self._refusals)

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

    def _left_s(self, member: _PoolMember) -> float:
        return self._began_at + member.timeout_s - time.monotonic()


class _PoolFuture(CallFuture):
    """A call to one server; continues with another one if it was not run."""

    def __init__(self, call: PoolCall) -> None:
        self._call = call
        self._attempts = call.attempts(blocking=False)
        pending = next(self._attempts)
        assert isinstance(pending, PendingCall)
        super().__init__(call.member.connection, pending, call.method)

    def _settle(self, pending: PendingCall) -> None:
        if self._call.is_refused(pending):
            self._go_on_aside()
        else:
            self._attempts.close()
            super()._settle(pending)

    def _go_on_aside(self) -> None:
        # Asking another server may block, and this thread reads all answers.
        self._connection.run_aside(self._go_on)

    def _go_on(self) -> None:
        """Takes the next step. No thread waits for its outcome: there may be thousands."""
        try:
            if self.cancelled():
                self._attempts.close()
                return
            step = next(self._attempts)
            if isinstance(step, float):
                clock.call_at(time.monotonic() + step, self._go_on_aside)
                return
            self._connection = self._call.member.connection
            try:
                # In one step, as `cancel` may take it out at any time.
                self._pending[0] = step
            except IndexError:
                step.cancel()
            step.when_done(self._settle)
            step.hurry()
        except BaseException as error:  # noqa: BLE001 - the future gets it
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
                self.set_exception(error)
            self._pending.clear()


class _AioPoolFuture(AioFuture, _PoolFuture):
    """One that asyncio can wrap."""


class _AllView(_Methods):
    def __init__(self, pool: Pool[Any], *, blocking: bool) -> None:
        self._pool = pool
        self._blocking = blocking

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        futures = list[CallFuture]()
        try:
            for member in self._pool._members:
                futures.append(Futures._call(member.connection, method, *args, **kwargs))
            return [future.result() for future in futures] if self._blocking else list(futures)
        except BaseException as error:
            for future in futures:
                if isinstance(error, Exception):
                    future.note_read()  # only one failure is raised
                else:  # a Ctrl-C: the caller does not wait any more
                    future.cancel()
            raise
