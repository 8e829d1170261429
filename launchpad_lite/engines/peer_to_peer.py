"""Peer-to-peer: every peer holds some values and computes updates; none knows everything.

The interface is that of the peer-to-peer engine of Owl ("OCaml Scientific Computing"); the overlay
is a ring after Chord (Stoica et al., SIGCOMM 2001).
"""

import random
import time
from collections.abc import Iterable, Mapping
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.engines._peer import PATIENCE_S, PING_S, Peer
from launchpad_lite.engines._values import Key, KeyJob, check_outside_pull
from launchpad_lite.engines.barriers import check_barrier
from launchpad_lite.engines.parameter_server import Versioned

#: Seconds until peers are asked again, when one or all of them have not answered.
_PAUSE_S = 0.05

_GONE = courier.ServerGoneError, courier.CallTimeoutError


class _Values:
    """The values of peers, wherever they are."""

    def get(self, key: Key) -> Versioned:
        """Returns a value and its version.

        Raises:
            UnknownKeyError: It was never set.
            ServerGoneError: No peer answers.
        """
        return Versioned(*self._asked("get", key))

    def set(self, key: Key, value: Any) -> None:
        """Sets a value, and makes the key known."""
        check_outside_pull("set")
        self._asked("set", key, value)

    def estimate(self) -> float:
        """Returns how many peers there are, about: of more than 24, from the answers of 100.

        It takes some seconds until all know of one that comes or leaves.
        """
        size: float = self._asked("estimate")
        return size

    def _asked(self, method: str, *args: Any) -> Any:
        """Calls a method of a peer."""
        raise NotImplementedError


class PeerToPeer(KeyJob, _Values):
    """The code of peers; subclass it.

    Each peer repeats a step: it gets the values of the keys that its `schedule` names, from the
    peers that have them, computes updates in `push`, and sends them there, where `pull` applies
    them. Then it asks other peers how far they are, and the `barrier` says when it may begin the next
    step. Each update is applied exactly once. Peers come and leave while the others go on; a peer that
    crashes loses no key that a living peer has a copy of.

    Only `push` and `schedule` have to be written. Each peer has a copy of this object.

    Attributes:
        barrier: When a peer may begin its next step. `PSP` asks a few others, `BSP` and `SSP` all.

    Example:
        class Sgd(engines.PeerToPeer):
            barrier = engines.PSP(3)

            def initial(self):
                return {column: np.zeros(10) for column in range(20)}

            def schedule(self):
                return [random.randrange(20)]

            def push(self, values):
                return {key: -0.1 * gradient(key, value) for key, value in values.items()}

        Sgd().add_to(program, peers=20)
    """

    def schedule(self) -> Iterable[Key]:
        """Returns with which keys this peer is to compute in its next step."""
        raise NotImplementedError(f"{type(self).__name__} has no schedule()")

    def push(self, values: dict[Any, Any]) -> Mapping[Any, Any]:
        """Returns updates, computed from the values: of the same keys, or fewer.

        Args:
            values: By key, what was scheduled. Do not change them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no push(values)")

    def stop(self) -> bool:
        """Returns whether this peer is to end. Asked before each of its steps."""
        return False

    def finish(self) -> None:
        """Is called in each peer when its last step is over, before it leaves the ring."""

    def add_to(
        self, program: lp.Program, *, peers: int, replicas: int = 2, label: str = "peer"
    ) -> "PeerToPeerHandle":
        """Adds peers to a program; returns a handle for its other nodes.

        A peer ends when its `stop` returns True. Launch with `restart={"peer": "on_failure"}` to have
        peers come back that crash.

        Args:
            program: What to add them to.
            peers: How many.
            replicas: On how many of them each key is, at least 2; so many, less one, may crash at a
                time.
            label: Their group.

        Raises:
            TypeError: `push` or `schedule` is missing, or the barrier is none.
            ValueError: A number is too small, or the program has such a group.
        """
        name = type(self).__name__
        for method in ("schedule", "push"):
            if getattr(type(self), method) is getattr(PeerToPeer, method):
                raise TypeError(f"{name} has no {method}, which every peer calls")
        check_barrier(self.barrier)
        if peers < 1 or replicas < 2:
            raise ValueError(f"{name}: at least 1 peer and 2 replicas, not {peers} and {replicas}")
        if label in program.groups:
            raise ValueError(f"the program has a group {label!r}; give another label=")
        nodes = [lp.CourierNode(Peer) for _ in range(peers)]
        handles = [node.create_handle() for node in nodes]
        by_name = {f"{label}[{number}]": handle for number, handle in enumerate(handles)}
        with program.group(label):
            for node, name in zip(nodes, by_name, strict=True):
                node.configure(self, name, {**by_name, name: None}, replicas)
                program.add_node(node)
        return PeerToPeerHandle(PeerToPeerClient, *handles)


class PeerToPeerClient(_Values):
    """The values of peers, seen from another node: what the handle becomes. Thread-safe.

    Example:
        class Evaluator:
            def __init__(self, peers: engines.PeerToPeerClient):
                self._peers = peers

            def run(self):
                print(self._peers.get("weights").value, self._peers.estimate())
    """

    def __init__(self, *peers: Any) -> None:
        self._peers = peers
        #: The peer to call; it calls the others.
        self._entry = random.choice(peers)  # noqa: S311 - no secret

    def _asked(self, method: str, *args: Any) -> Any:
        while True:
            try:
                return getattr(self._entry, method)(*args)
            except (*_GONE, courier.CallCancelledError):  # that peer has left, or its host
                self._entry = self._one_that_answers()

    def _one_that_answers(self) -> Any:
        gives_up_at = time.monotonic() + PATIENCE_S
        while True:
            time.sleep(_PAUSE_S)  # one that ends still answers; a restart takes a while
            for peer in random.sample(self._peers, len(self._peers)):
                try:
                    courier.with_timeout(peer, PING_S).neighbours()
                except _GONE:
                    if time.monotonic() > gives_up_at:
                        raise
                else:
                    return peer


class PeerToPeerHandle(lp.Deferred[PeerToPeerClient]):
    """A handle of peers: becomes a `PeerToPeerClient` in a running node.

    Example:
        peers = Sgd().add_to(program, peers=20)
        program.add_node(lp.CourierNode(Evaluator, peers), label="evaluator")
    """
