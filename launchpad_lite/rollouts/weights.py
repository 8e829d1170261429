"""Versioned parameters: one node publishes them, any number of others read the newest."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import courier
import launchpad_lite as lp
from courier import lowlevel
from launchpad_lite.parts.nests import difference, leaves, rebuilt, structure_of
from launchpad_lite.parts.threads import start_thread
from launchpad_lite.parts.waiting import is_set_within
from launchpad_lite.rollouts._patience import RETRY_S, SILENT_S, call_patiently
from launchpad_lite.rollouts._relay import SentWeights, WeightsRelay
from launchpad_lite.rollouts.errors import WeightsError

Dtype = str | Callable[[Any], Any] | None

#: Seconds for which a call waits for a newer version, before it is made again.
_POLL_S = 5.0
#: Bytes from which on readers on other machines pass versions on.
_MIN_PASSED_BYTES = 1 << 20


class VersionedWeights(NamedTuple):
    """Parameters and their version, which counts from 1, and jumps when the node was lost.

    Example:
        params, version = weights.latest()
    """

    params: Any
    version: int


class WeightsNode:
    """Keeps the newest version. All its methods are for its event loop."""

    def __init__(self) -> None:
        self._name = lp.current_node().name
        #: Beyond all versions of an earlier life of this node: readers may still have one.
        self._version = lp.restart_count() << 32
        self._shared: courier.Shared[Any] | None = None
        self._structure: dict[str, str] = {}
        self._newer = asyncio.Event()
        #: In which version each leaf has changed last; None: no reader on another machine asks.
        self._changed_at: list[int] | None = None
        #: What was sent last to a reader on another machine that had a version.
        self._changes = SentWeights()
        #: By `SentWeights.since`: readers that have the newest version or are about to get it, by their host.
        self._holders: dict[int, dict[str, str]] = {}

    async def publish(self, params: Any, structure: dict[str, str], after: int) -> int:
        """Takes parameters, of a `structure_of`; returns their version, which is newer than `after`."""
        if self._structure and structure != self._structure:
            what = difference(self._structure, structure)
            raise WeightsError(
                f"the weights have another structure than the version before: {what}"
            )
        self._structure = structure
        before, self._shared = self._shared, courier.Shared(params)
        self._version = max(self._version, after) + 1
        if self._changed_at is not None and before is not None:
            pairs = zip(leaves(before.value, ""), leaves(params, ""), strict=True)
            for number, ((_, old), (_, new)) in enumerate(pairs):
                if not _is_equal(old, new):
                    self._changed_at[number] = self._version
        self._changes, self._holders = SentWeights(), {}
        self._newer.set()
        self._newer = asyncio.Event()
        return self._version

    @courier.idempotent
    async def get(self, newer_than: int, wait_s: float, has_it: bool, at: str = "") -> SentWeights:
        """Returns the newest version.

        A caller on another machine that has the version `newer_than` gets the leaves that differ. One
        that passes on what it gets, at an address, may be told who has it.
        """
        if self._shared is None or self._version <= newer_than:
            if not await is_set_within(self._newer, wait_s):
                return SentWeights()
        sent = SentWeights(self._version, 0, self._shared)
        if self._shared is None or not _host_of_caller():
            return sent
        if has_it:
            sent = self._difference(newer_than, self._shared)
        size = sum(_size_of(leaf) for _, leaf in leaves(sent.value.value)) if at else 0
        holder = self._holder(sent.since, at) if size >= _MIN_PASSED_BYTES else ""
        return sent._replace(value=None, holder=holder) if holder else sent

    def _difference(self, since: int, shared: courier.Shared[Any]) -> SentWeights:
        if self._changed_at is None:
            self._changed_at = [self._version] * len(self._structure)
        if (self._changes.version, self._changes.since) != (self._version, since):
            changed = {
                number: leaf
                for number, (_, leaf) in enumerate(leaves(shared.value, ""))
                if self._changed_at[number] > since
            }
            if len(changed) == len(self._structure):
                return SentWeights(self._version, 0, shared)
            self._changes = SentWeights(self._version, since, courier.Shared(changed))
        return self._changes

    def _holder(self, since: int, at: str) -> str:
        """Returns which reader has what one at an address is to get; empty: it gets it from here.

        The first on a host has it for the others there. Hosts are a tree, in the order in which they
        ask: each passes it on to two.
        """
        holders = self._holders.setdefault(since, {})
        first = holders.setdefault(lowlevel.split_address(at)[0], at)
        if first != at:
            return first
        addresses = list(holders.values())
        place = addresses.index(at)
        return addresses[(place - 1) // 2] if place else ""

    @courier.idempotent
    async def seen_at(self) -> tuple[str, str]:
        """Returns the host of the caller, as a number; empty if that is this machine. And the name of this node."""
        return _host_of_caller(), self._name

    @courier.idempotent
    async def version(self) -> int:
        """Returns the newest version; 0 if there is none."""
        return 0 if self._shared is None else self._version


class WeightsClient:
    """Versioned parameters, seen from any node: what a `WeightsHandle` becomes. Thread-safe.

    Example:
        class Evaluator:
            def __init__(self, weights: rollouts.WeightsClient):
                self._weights = weights

            def run(self):
                for params, version in self._weights.versions():
                    print(version, self.evaluate(params))
    """

    def __init__(self, node: Any, *, refuse_nan: bool = False, dtype: Dtype = None) -> None:
        """Makes one; the handle does that."""
        self._node = node
        self._dtype = dtype
        self._version = courier.with_timeout(node, SILENT_S).version
        self._refuse_nan = refuse_nan
        #: What was published last, and its version: the node may lose it.
        self._last: tuple[Any, int] = None, 0
        self._relay = WeightsRelay(node)

    def publish(self, params: Any) -> int:
        """Makes parameters the newest version, and returns it. Readers do not hold it up.

        What is published is a copy: `params` may change afterwards.

        Args:
            params: Arrays of numpy, PyTorch or JAX, in dicts, lists and tuples; or any picklable value.

        Raises:
            WeightsError: They have another structure than before: other names, shapes or types. Or
                they have a NaN, and `refuse_nan` was set.
        """
        if self._refuse_nan:
            for path, leaf in leaves(params, "params"):
                is_array = hasattr(leaf, "shape")
                # Of any library: only a NaN differs from itself.
                if not (bool((leaf == leaf).all()) if is_array else leaf == leaf):
                    raise WeightsError(f"{path} has a NaN, and refuse_nan=True")
        _, known = self._last
        self._last = params, self._send(params, known) or known
        return self._last[-1]

    def _send(self, params: Any, after: int) -> int | None:
        if self._dtype is not None:
            params = rebuilt(params, lambda leaf: _converted(leaf, self._dtype))
        structure = structure_of(params, "params")
        version: int | None = call_patiently(self._node.publish, params, structure, after)
        return version

    def keep(self) -> None:
        """Publishes the last parameters again, as they are now, if the node has lost them."""
        params, version = self._last
        known = call_patiently(self._version) if version else None
        if known is not None and known < version:
            self._send(params, version - 1)

    def latest(self) -> VersionedWeights:
        """Returns the newest version; waits until there is one."""
        return self.get()

    def get(
        self, newer_than: int = 0, timeout_s: float | None = None, *, known: Any = None
    ) -> VersionedWeights:
        """Returns the newest version; waits until it is newer than a known one.

        Arrays are the reader's own: writing to them changes them for nobody else. On the host of
        the node they share memory until then.

        Args:
            newer_than: The known version.
            timeout_s: Seconds to wait; None waits until the node stops.
            known: The parameters of the known version, if they were not changed: another machine is
                sent only arrays that differ. The result shares the others with them.

        Raises:
            TimeoutError: It did not come in time, or this node is to stop.
        """
        give_up_at = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        at = own = self._relay.address() if timeout_s is None else ""
        while not lp.stop_event().is_set():
            left_s = max(0.0, give_up_at - time.monotonic())
            node = self._node
            if timeout_s is not None:
                node = courier.with_timeout(node, left_s + 1)
            began_at = time.monotonic()
            try:
                sent = node.get(newer_than, min(left_s, _POLL_S), known is not None, at)
            except courier.CallTimeoutError:
                break
            except courier.ServerGoneError:  # it is started again
                lp.stop_event().wait(min(left_s, RETRY_S))
                sent = SentWeights()
            if holder := sent.holder:
                sent = self._relay.ask(sent)
                if sent.version <= 0:
                    at = ""
                    continue
            if sent.version:
                # Another reader on this machine serves those here.
                if own and holder.rpartition(":")[0] != own.rpartition(":")[0]:
                    self._relay.keep(sent, time.monotonic() - began_at)
                else:
                    self._relay.drop(sent.version)
                params = _merged(known, sent.value) if sent.since else sent.value
                return VersionedWeights(params, sent.version)
            if left_s == 0:
                break
        raise TimeoutError(f"no version of the weights is newer than {newer_than}")

    def versions(self, newer_than: int = 0) -> Iterator[VersionedWeights]:
        """Yields the newest version, again and again, until this node is to stop; skips those between."""
        while True:
            try:
                found = self.get(newer_than)
            except TimeoutError:  # this node is to stop
                return
            newer_than = found.version
            yield found

    def subscribe(self, function: Callable[[Any, int], object]) -> None:
        """Calls a function with each newest (params, version) in a thread, until this node is to stop."""

        def follow() -> None:
            for params, version in self.versions():
                function(params, version)

        start_thread(follow)


class WeightsHandle(lp.Deferred[WeightsClient]):
    """A handle of versioned parameters: becomes a `WeightsClient` in a running node.

    Example:
        weights = rollouts.Weights().add_to(program)
        program.add_node(lp.CourierNode(Trainer, weights), label="trainer")
    """


class Weights:
    """Versioned parameters for many readers, kept by a node of their own.

    A reader never sees a torn or mixed version. Readers on the host of the node share its memory;
    for others, the parameters are serialised once, and pass from machine to machine. The memory of
    a version is freed when its last reader is gone; a reader that passes it on keeps it until it gets
    a newer one.

    Example:
        weights = rollouts.Weights(refuse_nan=True).add_to(program)
    """

    def __init__(self, *, refuse_nan: bool = False, dtype: Dtype = None) -> None:
        """Describes it.

        Args:
            refuse_nan: Whether `publish` refuses parameters that have a NaN.
            dtype: To which arrays of floating-point numbers are converted on the way, such as "float16";
                or a function of each array or other value. "bfloat16" is for PyTorch and JAX.
        """
        self._options: dict[str, Any] = {"refuse_nan": refuse_nan, "dtype": dtype}

    def add_to(self, program: lp.Program, *, label: str = "weights") -> WeightsHandle:
        """Adds the node to a program; returns a handle for other nodes.

        Args:
            program: What to add it to.
            label: Of the node.

        Raises:
            ValueError: The program has such a group.
        """
        if label in program.groups:
            raise ValueError(f"the program has a group {label!r}; give another label=")
        handle = program.add_node(lp.CourierNode(WeightsNode), label=label)
        return WeightsHandle(WeightsClient, handle, **self._options)


def _host_of_caller() -> str:
    """Returns the host of the caller, as a number; empty if it shares the memory of this machine."""
    peer = courier.current_call().peer
    return lowlevel.split_address(peer)[0] if peer.rpartition(":")[2].isdigit() else ""


def _size_of(leaf: Any) -> int:
    try:
        return int(getattr(leaf, "nbytes", 0))
    except Exception:  # noqa: BLE001 - a sparse tensor
        return 0


def _merged(known: Any, changed: dict[int, Any]) -> Any:
    numbers = itertools.count()
    return rebuilt(known, lambda leaf: changed.get(next(numbers), leaf))


def _is_equal(old: Any, new: Any) -> bool:
    """Returns whether arrays of any library are equal; False if they are none, or do not tell."""
    try:
        # Most differ in their first number.
        first = bool((old.reshape(-1)[:1] == new.reshape(-1)[:1]).all())
        return first and bool((old == new).all())
    except Exception:  # noqa: BLE001 - no array, a sparse tensor, an array of arrays: it is sent
        return False


def _converted(leaf: Any, dtype: Any) -> Any:
    if callable(dtype):
        return dtype(leaf)
    kind = str(getattr(leaf, "dtype", ""))  # of any library
    if "float" not in kind:
        return leaf
    if kind.startswith("torch."):
        import torch

        return leaf.to(getattr(torch, dtype))
    return leaf.astype(dtype)
