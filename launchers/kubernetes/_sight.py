"""What was seen of a run's objects: takes in changes, and answers questions about them. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from launchers.kubernetes import _reasons
from launchers.kubernetes._agreed import STOP_ANNOTATION, SUPERVISOR
from launchers.kubernetes._client import ChangeKind, Json
from launchers.kubernetes._names import Names
from launchpad_lite.launching import NodeStatus

#: Reason in the status of a Job that exceeded its time limit.
_TOO_LONG = "DeadlineExceeded"


class Sight:
    """What was seen of a run's objects. Not thread-safe.

    Attributes:
        jobs: Those that are there, by name.
        stopped_by: The request of another process to end the program; None: there was none.
    """

    def __init__(
        self, names: Names, nodes: Iterable[tuple[str, int]], movable: Collection[str] = ()
    ) -> None:
        """Begins with nothing. `movable` nodes continue in another pod if theirs is lost."""
        self._names = names
        self._movable = frozenset(movable)
        self._nodes = {names.host(*each): f"{each[0]}[{each[1]}]" for each in nodes}
        self._labels = {names.job(label): label for label in names.groups}
        #: In the order in which they were first seen; deleted ones stay.
        self._pods: dict[str, Json] = {}
        self._supervisors: dict[str, Json] = {}
        self._gone: set[str] = set()
        self.jobs: dict[str, Json] = {}
        self._deleted_jobs = set[str]()
        self.stopped_by: str | None = None
        self._events: dict[str, list[Json]] = {}

    def take_in(self, change: ChangeKind, obj: Json) -> None:
        """Takes in a change of a pod, Job or event; `LISTED` says that all of a kind were seen."""
        if change == "LISTED":
            # It was there when this began. A JobSet makes its Jobs later.
            first = self._names.supervisor_job
            if obj["kind"] == "Job" and first not in self.jobs and not self._names.jobset:
                self._deleted_jobs.add(first)
            return
        metadata = obj["metadata"]
        if obj["kind"] == "Pod":
            self._take_in_pod(change, obj)
        elif obj["kind"] == "Job" and change == "DELETED":
            self.jobs.pop(metadata["name"], None)
            self._deleted_jobs.add(metadata["name"])
        elif obj["kind"] == "Job":
            self.jobs[metadata["name"]] = obj
            self._deleted_jobs.discard(metadata["name"])
            word = (metadata.get("annotations") or {}).get(STOP_ANNOTATION)
            self.stopped_by = word or self.stopped_by
        elif obj["kind"] == "Event" and change != "DELETED":
            about = obj.get("involvedObject", {}).get("name", "")
            if about == self._names.run or about.startswith(f"{self._names.run}-"):
                told = self._events.setdefault(about, [])
                told[:] = [each for each in told if each["metadata"]["name"] != metadata["name"]]
                told.append(obj)

    def _take_in_pod(self, change: ChangeKind, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        before = self._pods.get(uid)
        self._pods[uid] = pod
        if _reasons.is_supervisor(pod):
            self._supervisors[uid] = pod
        if change == "DELETED":
            self._gone.add(uid)
        if _reasons.is_ready(pod) and before is not None and not _reasons.is_ready(before):
            # The machine was away only for a moment. That does not explain later events.
            told = self._events.get(_reasons.name_of(pod), [])
            told[:] = [each for each in told if each.get("reason") not in _reasons.LOST_MACHINE]

    @property
    def supervisor(self) -> Json | None:
        """The newest pod of the supervisor, though it may be gone and an earlier one still there."""

        def age(pod: Json) -> tuple[str, bool, bool]:
            # Times have whole seconds; of those that are alike, the newest was seen last.
            return (
                _reasons.created(pod),
                not self.is_gone(pod),
                "deletionTimestamp" not in pod["metadata"],
            )

        return max(reversed(self._supervisors.values()), key=age, default=None)

    def is_gone(self, pod: Json) -> bool:
        return pod["metadata"]["uid"] in self._gone

    def is_there(self, pod: Json) -> bool:
        return not self.is_gone(pod) and not _reasons.has_ended(pod)

    def is_away(self, pod: Json) -> bool:
        """Returns whether the cluster gets no signal from the machine of a pod that is there."""
        told = (each for each in self.events_of(pod) if each.get("reason") == _reasons.AWAY)
        return self.is_there(pod) and any(_reasons.is_loss(each, pod) for each in told)

    def node(self, pod: Json) -> str:
        """Returns the name of the node of a pod, or `supervisor`."""
        if _reasons.is_supervisor(pod):
            return SUPERVISOR
        return self._nodes.get(_reasons.host_of(pod), _reasons.host_of(pod))

    def pods_of_nodes(self) -> list[Json]:
        """Returns the pods of nodes, those that are gone, too, the oldest first."""
        # A server lists them in the order of their names, which says nothing.
        return sorted(
            (pod for pod in self._pods.values() if not _reasons.is_supervisor(pod)),
            key=_reasons.created,
        )

    def machine(self, host: str) -> str:
        """Returns the last known machine of the pods with a host name."""
        pods = [pod for pod in self.pods_of_nodes() if _reasons.host_of(pod) == host]
        return next(filter(None, map(_reasons.machine_of, reversed(pods))), "")

    def events_of(self, pod: Json) -> Sequence[Json]:
        return self._events.get(_reasons.name_of(pod), ())

    def loss_of(self, pod: Json) -> str | None:
        """Returns how a pod was lost; None if it is well or ended as it should."""
        return _reasons.loss_of(pod, self.events_of(pod))

    @property
    def is_suspended(self) -> bool:
        return any(job.get("spec", {}).get("suspend") for job in self.jobs.values())

    def waits(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        present = set[str]()
        for uid, pod in self._pods.items():
            if uid in self._gone or pod["metadata"].get("deletionTimestamp"):
                continue
            if not _reasons.has_ended(pod):
                present.add(_reasons.host_of(pod))
            if (wait := _reasons.wait_of(pod, self.events_of(pod))) is not None:
                found.setdefault(wait, []).append(self.node(pod))
        for pod, loss in self._lost():
            if self.node(pod) in self._movable and _reasons.host_of(pod) not in present:
                nodes = found.setdefault(f"another pod; the last one {loss}", [])
                if self.node(pod) not in nodes:  # several of its pods may have gone the same way
                    nodes.append(self.node(pod))
        for name, job in self.jobs.items():
            wait = _reasons.wait_of_job(job, self._events.get(name, ()))
            if wait is not None and not _reasons.is_over(job):
                label = self._labels.get(name)
                missing = [
                    node
                    for host, node in self._nodes.items()
                    if label is not None and node.startswith(f"{label}[") and host not in present
                ]
                found.setdefault(wait, []).extend(missing or [label or SUPERVISOR])
        return found

    def troubles(self) -> dict[str, list[str]]:
        """Returns nodes by what has happened to their pods, if it has had no other effect yet."""
        found: dict[str, list[str]] = {}
        for pod, loss in self._lost():
            if self.node(pod) not in self._movable:
                found.setdefault(f"its pod {_reasons.host_of(pod)} {loss}", []).append(
                    self.node(pod)
                )
        for pod in self._pods.values():
            if self.is_away(pod):
                # Perhaps only the kubelet is silent, and the pod continues.
                what = f"the cluster gets no signal from the machine {_reasons.machine_of(pod)}"
                found.setdefault(what, []).append(self.node(pod))
        return found

    def missing(self) -> list[str]:
        running = {
            _reasons.host_of(pod)
            for uid, pod in self._pods.items()
            if uid not in self._gone and _reasons.is_running(pod)
        }
        return [node for host, node in self._nodes.items() if host not in running]

    def status(self) -> tuple[NodeStatus, ...]:
        """Returns how each node is as its pod tells, for as long as the supervisor says nothing."""
        missing = set(self.missing())
        waits = {node: what for what, nodes in self.waits().items() for node in nodes}
        without_pod = "ended" if self.is_over else "pending"
        return tuple(
            NodeStatus(
                node,
                without_pod if node in missing else "starting",
                host,
                None,
                {},
                waits_for=waits.get(node, "") if node in missing and not self.is_over else "",
            )
            for host, node in self._nodes.items()
        )

    @property
    def is_over(self) -> bool:
        """Whether there will be no other pod of the supervisor."""
        name = self._names.supervisor_job
        return name in self._deleted_jobs or (
            name in self.jobs and _reasons.is_over(self.jobs[name])
        )

    def _lost(self) -> Iterator[tuple[Json, str]]:
        """Yields pods of nodes that ended and should not have, each with how it ended."""
        for pod in self.pods_of_nodes():
            # A pod whose machine does not answer may work for long, even when it is being deleted.
            if not self.is_there(pod) and (loss := self.loss_of(pod)) is not None:
                yield pod, loss

    @property
    def losses(self) -> Mapping[str, Sequence[str]]:
        """What became of pods that were lost, by their host name, in order."""
        found: dict[str, list[str]] = {}
        for pod in self.pods_of_nodes():
            if (loss := self.loss_of(pod)) is not None:
                found.setdefault(_reasons.host_of(pod), []).append(loss)
        return found

    def failed(self) -> dict[str, Json]:
        """Returns the last pod of each node that its Job has given up and makes no new pod for."""
        given_up = {
            f"{name}-{index}"
            for name, job in self.jobs.items()
            for index in _reasons.failed_indexes(job)
        }
        return {
            self.node(pod): pod for pod in self.pods_of_nodes() if _reasons.host_of(pod) in given_up
        }

    def interruption(self, reason: str) -> str:
        """Adds to the supervisor's reason of an end what the cluster knows of it."""
        job = self.jobs.get(self._names.supervisor_job, {})
        # The first is there before its pods have ended, the second after that.
        for end in (_reasons.condition(job, "FailureTarget"), _reasons.condition(job, "Failed")):
            if end.get("reason") == _TOO_LONG and end.get("status") == "True":
                return f"{reason}: it has run for as long as max_run_s says ({_reasons.said(end)})"
        if self._names.supervisor_job in self._deleted_jobs:
            return f"{reason}: the run was deleted"
        for host, node in self._nodes.items():
            if reason.endswith(f" to {node}") and (losses := self.losses.get(host)):
                return f"{reason}: its pod {host} {losses[-1]}"
        pod = self.supervisor
        if pod is None:
            return reason
        loss = self.loss_of(pod)
        if loss is None and "deletionTimestamp" in pod["metadata"]:
            loss = "was deleted"  # and ended in order
        return f"{reason}: its supervisor's pod {_reasons.name_of(pod)} {loss}" if loss else reason
