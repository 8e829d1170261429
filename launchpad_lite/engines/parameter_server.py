"""The parameter server: values on servers, workers that compute updates, a barrier between steps.

After Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), with
the interface of the Actor engine of Owl ("OCaml Scientific Computing").
"""

import concurrent.futures
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import courier
import launchpad_lite as lp
from launchpad_lite.engines._servers import (
    Coordinator,
    KeyServer,
    Progress,
    StepStart,
    UnknownMemberError,
    WorkerIdentity,
)
from launchpad_lite.engines._values import (
    Key,
    KeyJob,
    check_key,
    check_outside_pull,
    check_updates,
    hash_of,
)
from launchpad_lite.engines.barriers import check_barrier

#: Seconds between two heartbeats of a worker that waits at the barrier.
_HEARTBEAT_S = 1.0


class Versioned(NamedTuple):
    """A value and its version, which counts its changes.

    Example:
        weights, version = ps.get("weights")
    """

    value: Any
    version: int


class ParameterServerClient:
    """The values of a parameter server, seen from anywhere: what its handle becomes. Thread-safe.

    Example:
        class Evaluator:
            def __init__(self, ps: engines.ParameterServerClient):
                self._ps = ps

            def run(self):
                while not lp.wait_for_stop(10):
                    print(self._ps.get("weights").value, self._ps.progress())
    """

    def __init__(self, *servers: Any, has_begun: bool = False) -> None:
        #: Clients, in order.
        self._servers = servers
        self._coordinator: Coordinator = servers[0]
        #: Whether the first values have been set.
        self._has_begun = has_begun

    def _begin(self) -> None:
        if not self._has_begun:
            self._coordinator.begin()
            self._has_begun = True

    def get(self, key: Key) -> Versioned:
        """Returns a value and its version. Do not change the value: others may have the same.

        Raises:
            UnknownKeyError: It was never set.
            TypeError: The key is of a type that keys do not have.
        """
        self._begin()
        server: KeyServer = self._servers[hash_of(key) % len(self._servers)]
        _, [(_, version, value)] = server.read({key: -1})
        return Versioned(value.value if isinstance(value, courier.Shared) else value, version)

    def set(self, key: Key, value: Any) -> None:
        """Sets a value, and makes the key known.

        Raises:
            TypeError: The key is of a type that keys do not have.
        """
        self._begin()
        self._put({key: value}, replace=True)

    def set_first(self, values: Mapping[Key, Any]) -> None:
        """Sets values of keys that have none. For the engine."""
        self._put(values, replace=False)

    def _put(self, values: Mapping[Key, Any], *, replace: bool) -> None:
        for key in values:
            check_key(key)
        for place, keys in _parted(values, self._servers).items():
            done = self._servers[place].put({key: values[key] for key in keys}, replace)
            if done is not None:  # the server is this node
                done.result()
        self._coordinator.add_keys(list(values))

    def keys(self) -> list[Key]:
        """Returns all keys."""
        self._begin()
        return self._coordinator.keys()

    def worker_num(self) -> int:
        """Returns how many workers take part now."""
        return self._coordinator.worker_num()

    def progress(self) -> Progress:
        """Returns how far the workers are."""
        return self._coordinator.progress()

    def work(self, job: "ParameterServer") -> Iterator[int]:
        """Takes part as a worker; yields after each step how many it has finished.

        It joins when the first step begins, where the slowest worker is, and leaves when the loop
        ends, by `break` for instance. The loop ends by itself when the engine stops.

        Args:
            job: What to do in a step.

        Raises:
            UpdateError: `push` returned updates for other keys than it got, or one that cannot be
                applied.
            UnknownKeyError: `schedule` named a key that was never set.
            NoProgramError: Not called in a node.

        Example:
            for step in ps.work(Sgd()):
                if step == 100:
                    break  # leaves; the others do not wait for it
        """
        return self._work(job, joins_calls=False)

    def work_to_the_end(self, job: "ParameterServer") -> None:
        """Takes part as a worker until the engine stops. For the engine."""
        for _ in self._work(job, joins_calls=True):  # no caller reads values between two steps
            pass

    def _work(self, job: "ParameterServer", *, joins_calls: bool) -> Iterator[int]:
        self._begin()
        return _Participant(self._servers, job.in_node_of(self._servers), joins_calls).steps()


class _Participant:
    """A worker that takes part."""

    def __init__(self, servers: Sequence[Any], job: "ParameterServer", joins_calls: bool) -> None:
        self._servers = servers
        self._job = job
        #: Whether updates for the first server go with the call that begins the next step, and so are
        #: applied only then. That saves a call.
        self._joins_calls = joins_calls
        #: The last values that were read: by key, version and value.
        self._read: dict[Key, tuple[int, Any]] = {}
        #: By server, the life that these versions are from.
        self._lives = [""] * len(servers)
        #: Keys of the last step that are on the first server.
        self._first_keys: Sequence[Key] = ()
        self._unsent: Mapping[Key, Any] = {}
        self._node = lp.current_node().name
        self._member: WorkerIdentity | None = None
        self._pushes = False
        #: The call that asks to begin a step; cancelled when the node stops.
        self._call: Any = None

    def steps(self) -> Iterator[int]:
        lp.register_stop_handler(self._give_up)
        try:
            yield from self._steps()
        finally:
            lp.unregister_stop_handler(self._give_up)

    def _give_up(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _steps(self) -> Iterator[int]:
        finished: int | None = None
        while True:
            try:
                presence = iter(
                    self._servers[0].stay(self._node, lp.restart_count(), self._member, finished)
                )
            except courier.ServerLostError:
                continue  # the coordinator was started again
            try:
                member, finished = next(presence)
                self._member = member
                while (start := self._advance(member, finished)) is not None:
                    self._step(member, finished, start)
                    finished += 1
                    yield finished
                return
            except (UnknownMemberError, courier.ServerLostError) as error:
                is_lost = courier.remote_traceback(error) is None
                if self._pushes or not (is_lost or isinstance(error, UnknownMemberError)):
                    raise  # by code of the user, here or on a server
                if self._unsent and finished:
                    # It is not known whether they were applied: the step is made again, with
                    # others.
                    finished -= 1
                    self._unsent = {}
                continue  # the coordinator was started again
            finally:
                presence.close()

    def _advance(self, member: WorkerIdentity, finished: int) -> StepStart | None:
        stop = lp.stop_event()
        versions = {key: self._read[key][0] for key in self._first_keys}
        call = self._call = self._servers[0].futures.advance(
            member, finished, self._unsent, versions, self._lives[0]
        )
        while not stop.is_set():
            lp.heartbeat()  # a worker that waits for others is not hung
            try:
                start: StepStart | None = call.result(_HEARTBEAT_S)
            except (concurrent.futures.TimeoutError, courier.CallCancelledError):
                if call.done() and not stop.is_set():
                    raise
            else:
                self._unsent = {}
                return start
        call.cancel()
        if self._unsent:
            self._servers[0].update(member, finished - 1, self._unsent)
        return None

    def _step(self, member: WorkerIdentity, step: int, start: StepStart) -> None:
        values = self._values(start)
        self._pushes = True
        updates = self._job.push(member.name, values)
        self._pushes = False
        check_updates(updates, values, member.name, step)
        parts = {
            place: {key: updates[key] for key in part}
            for place, part in _parted(updates, self._servers).items()
        }
        unsent = parts.pop(0, {}) if self._joins_calls else {}
        calls = [
            self._servers[place].futures.update(member, step, part) for place, part in parts.items()
        ]
        for call in calls:
            call.result()
        self._unsent = unsent

    def _values(self, start: StepStart) -> dict[Key, Any]:
        has_come = set(self._first_keys)
        self._keep(0, start.life, start.changed)
        parts = _parted(start.keys, self._servers)
        self._first_keys = parts.get(0, ())
        parts[0] = [key for key in self._first_keys if key not in has_come]
        calls = []
        for place, part in parts.items():
            if part:
                wanted = {key: self._read[key][0] if key in self._read else -1 for key in part}
                call = self._servers[place].futures.read(wanted, self._lives[place])
                calls.append((place, call))
        for place, call in calls:
            self._keep(place, *call.result())
        return {key: self._read[key][1] for key in start.keys}

    def _keep(self, place: int, life: str, changed: Sequence[tuple[Key, int, Any]]) -> None:
        if life != self._lives[place]:  # it was started again, and counts other versions
            self._lives[place] = life
            for key in _parted(self._read, self._servers).get(place, ()):
                del self._read[key]
        self._read.update({key: (version, value) for key, version, value in changed})


class ParameterServer(KeyJob):
    """The code of a parameter server; subclass it.

    Each worker repeats a step: it gets the values of the keys that `schedule` has for it, computes
    updates in `push`, and the servers apply them with `pull`. Then the `barrier` says when it may
    begin the next step. A server applies updates one after the other, those of one step together,
    and each exactly once; reads do not wait for that. A worker that is lost leaves the barrier at
    once; one that comes, or comes back, begins where the slowest is.

    Only `push` has to be written. `schedule` and `stop` run on the first server, `pull` on the one
    that has the key, `push` in the workers. Each node has a copy of this object.

    Attributes:
        barrier: When a worker may begin its next step.

    Example:
        class Sgd(engines.ParameterServer):
            barrier = engines.SSP(4)

            def initial(self):
                return {"weights": np.zeros(10)}

            def push(self, worker, values):
                return {"weights": -0.1 * gradient(values["weights"])}

            def stop(self):
                return self.get("weights").version >= 1000

        ps = Sgd().add_to(program, workers=8)  # a handle, for other nodes
    """

    def schedule(self, workers: Sequence[str]) -> Mapping[str, Sequence[Key]]:
        """Returns which keys workers are to compute with in their next step. By default all keys.

        Args:
            workers: Names of those that may begin one now.
        """
        keys = self.keys()
        return dict.fromkeys(workers, keys)

    def push(self, worker: str, values: dict[Any, Any]) -> Mapping[Any, Any]:
        """Returns the updates that a worker computes from the values: of the same keys, or fewer.

        Args:
            worker: Its name, as `ps_worker[3]`.
            values: By key, what was scheduled for it. Do not change them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no push(worker, values)")

    def visible(self, key: Any, value: Any) -> Any:  # noqa: ARG002
        """Returns what workers and `get` see of a value. By default the value.

        So a server can keep more than it sends, such as the state of an optimizer. Called on the
        server of the key after each change of the value, before it can be read. May not call `get`,
        `set`, `keys` and `worker_num`.

        Args:
            key: Whose value it is.
            value: The value. Do not change it, and do not change later what this returns.
        """
        return value

    def stop(self) -> bool:
        """Returns whether all is done. Asked each time that a worker wants to go on."""
        return False

    def get(self, key: Key) -> Versioned:
        """Returns a value and its version.

        Raises:
            UnknownKeyError: It was never set.
        """
        found: Versioned = self._asked("get", key)
        return found

    def set(self, key: Key, value: Any) -> None:
        """Sets a value, and makes the key known."""
        self._asked("set", key, value)

    def set_first(self, values: Mapping[Key, Any]) -> None:
        """Sets values of keys that have none. For the engine."""
        self._asked("set_first", values)

    def keys(self) -> list[Key]:
        """Returns all keys."""
        found: list[Key] = self._asked("keys")
        return found

    def worker_num(self) -> int:
        """Returns how many workers take part now."""
        count: int = self._asked("worker_num")
        return count

    def in_node_of(self, servers: Sequence[Any]) -> "ParameterServer":
        """Returns a copy for a node of the engine. For the engine."""
        client = ParameterServerClient(*servers, has_begun=True)

        def ask(method: str, *args: Any) -> Any:
            check_outside_pull(method)
            return getattr(client, method)(*args)

        job = self.in_node(ask)
        job.start()
        return job

    def add_to(
        self,
        program: lp.Program,
        *,
        workers: int,
        servers: int = 1,
        label: str = "ps",
        progress_s: float | None = 10.0,
    ) -> "ParameterServerHandle":
        """Adds servers and workers to a program; returns a handle for its other nodes.

        The workers end when `stop` returns True. Others may take part with the handle, too: see
        `ParameterServerClient.work`.

        Args:
            program: What to add them to.
            workers: How many nodes of the group `<label>_worker`.
            servers: How many nodes of the group `<label>_server`; the keys are divided among them.
            label: The beginning of the names of both groups.
            progress_s: Seconds between two lines of progress; None for none.

        Raises:
            TypeError: `push` is missing, or the barrier is none.
            ValueError: A number is too small, or the program has such a group.
        """
        name = type(self).__name__
        if type(self).push is ParameterServer.push:
            raise TypeError(f"{name} has no push(worker, values), which computes the updates")
        check_barrier(self.barrier)
        if workers < 0 or servers < 1:
            raise ValueError(
                f"{name}: at least 1 server and 0 workers, not {servers} and {workers}"
            )
        if progress_s is not None and not progress_s > 0:
            raise ValueError(f"{name}: progress_s is above 0, or None, not {progress_s!r}")
        groups = f"{label}_server", f"{label}_worker"
        if taken := [group for group in groups if group in program.groups]:
            raise ValueError(f"the program has a group {taken[0]!r}; give another label=")
        nodes: list[lp.CourierNode[Any]] = [
            lp.CourierNode(KeyServer if number else Coordinator) for number in range(servers)
        ]
        handles: list[lp.Handle[Any]] = [node.create_handle() for node in nodes]
        for number, node in enumerate(nodes):
            others = [handle if other != number else None for other, handle in enumerate(handles)]
            node.configure(self, others, *([] if number else [progress_s]))
        with program.group(groups[0]):
            for node in nodes:
                program.add_node(node)
        handle = ParameterServerHandle(ParameterServerClient, *handles)
        with program.group(groups[1]):
            for _ in range(workers):
                program.add_node(lp.PyNode(ParameterServerClient.work_to_the_end, handle, self))
        return handle


class ParameterServerHandle(lp.Deferred[ParameterServerClient]):
    """A handle of a parameter server: becomes a `ParameterServerClient` in a running node.

    Example:
        ps = Sgd().add_to(program, workers=8)
        program.add_node(lp.CourierNode(Evaluator, ps), label="evaluator")
    """


def _parted(keys: Any, servers: Sequence[Any]) -> dict[int, list[Key]]:
    """Returns the keys that each server has, by its index."""
    if len(servers) == 1:
        return {0: list(keys)} if keys else {}
    parts: dict[int, list[Key]] = {}
    for key in keys:
        parts.setdefault(hash_of(key) % len(servers), []).append(key)
    return parts
