"""Nodes in pods of a Kubernetes cluster, for users who may create ordinary objects in one namespace."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launchers.hosts.shipping import pack_up
from launchers.hosts.toml import read_toml
from launchers.kubernetes._admission import refusals
from launchers.kubernetes._agreed import FIRST_PORT, PLAN_ANNOTATION, SUPERVISOR
from launchers.kubernetes._client import Api, ApiError, Json, created_by
from launchers.kubernetes._names import Names
from launchers.kubernetes._objects import Cluster, Group, Manifests, owned
from launchers.kubernetes._order import (
    PackedRun,
    PodOrder,
    WorkPlace,
    WorkStore,
    WorkVolume,
    pack,
    put,
    take_back,
)
from launchers.kubernetes._pods import PodOptions, Volume
from launchers.kubernetes._program import KubernetesProgram
from launchers.kubernetes._state import WaitLimits
from launchers.kubernetes._timing import DEFAULT, Timing
from launchers.supervision.run_folder import make_run_folder
from launchpad_lite.errors import LaunchError
from launchpad_lite.graph.freeze import FrozenWork
from launchpad_lite.launching import (
    Executable,
    Finding,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    Resources,
    RestartPolicy,
    RunningProgram,
)

__all__ = ["KubernetesLauncher", "PodOptions", "Volume", "WorkStore", "WorkVolume"]

#: Name in `pods=` that stands for all pods.
_ALL = "*"
#: How often to look for an object whose creation was interrupted.
_LOOKS = 3
#: The largest number in an integer field of Kubernetes.
_INT32_MAX = (1 << 31) - 1


class KubernetesLauncher(Launcher):
    """Runs each node in a pod of its own, and their supervisor in another.

    It needs a namespace in which the user may create Jobs, Services, Secrets and NetworkPolicies, read
    and delete pods, and read their logs: `docs/kubernetes.md` has the Role. Pods have no rights at
    all. Each group of nodes is an Indexed Job, found by DNS names. The Job of the supervisor owns all
    other objects of a run: deleting that Job removes everything.

    An image must have Python, of the same minor version as here, and launchpad-lite with all that
    the program imports from installed packages. Code that is not installed is sent along.

    All connections between nodes are under TLS, with certificates that are made for the run.
    """

    def __init__(
        self,
        image: str | None = None,
        *,
        namespace: str | None = None,
        context: str | None = None,
        name: str | None = None,
        pods: Mapping[str, PodOptions | Mapping[str, Any]] | str | Path | None = None,
        queue: str | None = None,
        jobset: bool = False,
        gpu_resource: str = "nvidia.com/gpu",
        network_policy: bool = True,
        work: WorkPlace | None = None,
        detach: bool = False,
        schedule_s: float = 600.0,
        silence_s: float = 20.0,
        launcher_silence_s: float = 300.0,
        ttl_s: int = 3600,
        max_run_s: int | None = None,
        timing: Timing = DEFAULT,
    ) -> None:
        """Prepares it; asks no cluster yet.

        Args:
            image: Image of all pods, unless `pods` says otherwise.
            namespace: Where the objects are made; by default that of the context.
            context: Of the kubeconfig; by default its current one, and inside of a cluster that
                cluster.
            name: Name of the run and of its first object: at most 40 lower-case letters, digits and
                dashes. By default the program's with a few random characters.
            pods: Options of pods: PodOptions, or dicts like them, by name of the group; `"*"` for all,
                `"supervisor"` for the supervisor's pod. Or the path of a TOML file with such tables.
            queue: Name of a queue of Kueue that admits the run.
            jobset: Make one JobSet of all, so that it is admitted as a whole.
            gpu_resource: What the cluster calls accelerators.
            network_policy: Let only pods of the run connect to them.
            work: Where the nodes' work and code is put if it is too large for Secrets.
            detach: Return as soon as the objects are made; the run continues without this process.
            schedule_s: Seconds within which all pods must run. Pods that replace lost ones have 10 minutes
                more, because Kubernetes may wait so long before it makes one. With `queue` and without
                `jobset`, the time counts from the admission of all Jobs, and only in this process:
                there is no limit for pods of detached runs, nor for pods that replace lost ones.
            silence_s: Seconds after which a pod that says nothing is lost.
            launcher_silence_s: Seconds without a sign of life of this process after which the run ends by
                itself; at least 180, because Kubernetes may take 2 minutes to pass a sign of life on.
            ttl_s: Seconds after its end at which the cluster removes a run that was not removed,
                a whole number.
            max_run_s: Seconds after which the cluster ends the run, a whole number; None: never.
            timing: Limits and pauses of this process; for tests.

        Raises:
            ValueError: Options are malformed; all mistakes are listed.
            TypeError: A value is of the wrong type.
        """
        self._image = image
        self._namespace = namespace
        self._context = context
        self._run = name
        self._pods = _read_pods(pods)
        self._queue = queue
        self._jobset = jobset
        self._work = work
        self._detach = detach
        self._schedule_s = schedule_s
        self._silence_s = silence_s
        self._launcher_silence_s = launcher_silence_s
        self._timing = timing
        #: Makes the settings of a run; what is not known yet is given then.
        self._cluster = functools.partial(
            Cluster,
            namespace=namespace,
            ttl_s=ttl_s,
            max_run_s=max_run_s,
            queue=queue,
            gpu_resource=gpu_resource,
            network_policy=network_policy,
        )
        mistakes = [
            *_seconds_mistakes("schedule_s", schedule_s, 1, math.inf),  # it may wait without end
            *_seconds_mistakes("silence_s", silence_s, 1, sys.float_info.max),
            *_seconds_mistakes("launcher_silence_s", launcher_silence_s, 180, sys.float_info.max),
            *_seconds_mistakes("ttl_s", ttl_s, 0, _INT32_MAX),
        ]
        if max_run_s is not None:
            mistakes += _seconds_mistakes("max_run_s", max_run_s, 1, _INT32_MAX)
        if name is not None:
            try:
                Names.of("", (), name)
            except ValueError as error:
                mistakes.append(str(error))
        if mistakes:
            raise ValueError("; ".join(mistakes))
        self.description = f"pods of Kubernetes{f', namespace {namespace}' if namespace else ''}"

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns why no objects can be made of it; what a cluster refuses is found by `start`."""
        labels = list(dict.fromkeys(each.label for each in executables))
        known = {_ALL, SUPERVISOR, *labels}
        found = [
            f"pods= of an unknown group {group!r}; the groups are: {', '.join(labels)}"
            for group in self._pods
            if group not in known
        ]
        if SUPERVISOR in labels and SUPERVISOR in self._pods:
            found.append(
                "pods= of 'supervisor' may mean the group or the supervisor of the run: rename the group"
            )
        try:
            manifests = self._manifests("program", _with_ports(executables), LaunchOptions())
            found += manifests.mistakes()
        except (ValueError, TypeError) as error:
            found.append(str(error))
        return found

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns what is asked of the cluster."""
        found = [
            f"{label}: {count} pod{'s' if count > 1 else ''} of {self._pod(label).image}"
            for label, count in Counter(each.label for each in executables).items()
        ]
        if self._queue is not None and not self._jobset:
            found.append(
                "a queue admits each Job by itself: without jobset=True, some groups may get their "
                "pods while others wait"
            )
        return found

    @property
    def _inner_schedule_s(self) -> float:
        """Seconds that pods and their supervisor wait for each other."""
        # A queue admits each Job at a time of its own, which only this process sees. So the limit is
        # kept here; pods would count from their own start.
        return math.inf if self._queue is not None and not self._jobset else self._schedule_s

    def _pod(self, label: str) -> PodOptions:
        for_all = self._pods.get(_ALL, PodOptions()).over(PodOptions(image=self._image))
        return self._pods.get(label, PodOptions()).over(for_all)

    def _manifests(
        self, program: str, executables: Sequence[Executable], options: LaunchOptions
    ) -> Manifests:
        members: dict[str, list[Executable]] = {}
        for each in executables:
            members.setdefault(each.label, []).append(each)
        cluster = self._cluster(
            Names.of(program, members, self._run, jobset=self._jobset),
            # JSON knows no infinity.
            notice_s=options.notice_s if math.isfinite(options.notice_s) else -1.0,
            schedule_s=self._inner_schedule_s,
            launcher_silence_s=None if self._detach else self._launcher_silence_s,
        )
        groups = [Group(label, tuple(nodes), self._pod(label)) for label, nodes in members.items()]
        return Manifests(cluster, groups, self._pod(SUPERVISOR), program)

    def checks(self) -> Mapping[str, Callable[[], Finding]]:
        """Returns a check that asks the API server for pods, if there is a configuration."""
        return {"kubernetes": self._check}

    def _check(self) -> Finding:
        is_set = not os.environ.keys().isdisjoint(("KUBECONFIG", "KUBERNETES_SERVICE_HOST"))
        if not is_set and not Path("~/.kube/config").expanduser().exists():
            return Finding("none", "there is no kubeconfig, and this is no pod")
        with contextlib.closing(Api.connect(self._context, self._namespace)) as api:
            return Finding("ok", f"{api.server} lets us list pods of the namespace {api.namespace}")

    def _make(
        self, plan: LaunchPlan, options: LaunchOptions, *, suspended: bool
    ) -> tuple[Names, PackedRun, list[Json]]:
        """Returns all objects of a run; LaunchError if they cannot be made."""
        executables = _with_ports(plan.executables)
        shipment = pack_up(plan.executables, is_installed=True)
        try:
            manifests = self._manifests(plan.program, executables, options)
            names = manifests.cluster.names
            order = PodOrder(
                plan=dataclasses.replace(plan, executables=tuple(executables)).outline(),
                options=dataclasses.replace(options, log_dir=None),
                names=names,
                schedule_s=self._inner_schedule_s,
                silence_s=self._silence_s,
                launcher_silence_s=self._launcher_silence_s,
            )
            packed = pack(order, plan, shipment, self._work)
            objects = dataclasses.replace(manifests, files=packed).objects(suspended=suspended)
        except ValueError as error:
            raise LaunchError(f"program {plan.program!r}: {error}") from error
        return names, packed, objects

    def emit(self, plan: LaunchPlan, options: LaunchOptions) -> Mapping[str, bytes]:
        """Returns what `start` would create, as JSON: a file for each object, and a script.

        `kubectl create -f FOLDER` creates all; `create.sh` also makes them belong to the first, so
        that deleting that removes all. Asks no cluster, but writes the work to where `work=` says,
        from where its owner removes it.
        """
        launcher = copy.copy(self)
        launcher._detach = True  # no launching process waits for what is emitted
        _, packed, objects = launcher._make(plan, options, suspended=False)
        files = {}
        jobs = []
        for number, each in enumerate([*objects[1:], objects[0]]):
            kind, name = each["kind"].lower(), each["metadata"]["name"]
            file = f"{number:02}-{kind}-{name}.json"
            files[file] = json.dumps(each, indent=2).encode()
            if kind == "job" and each is not objects[0]:
                jobs.append(file)
        root = objects[0]
        words = {
            "kind": root["kind"],
            "api": root["apiVersion"],
            "name": root["metadata"]["name"],
            "root": list(files)[-1],
            "jobs": " ".join(jobs),
            "flags": f"--namespace={self._namespace}" if self._namespace else "",
        }
        start = _RESUME.format(**words) if self._queue is None else "# The queue starts it."
        script = _CREATE.format(**words, start=start)
        put(packed)
        return {**files, "create.sh": script.encode()}

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Creates all objects; returns when all nodes are placed and their addresses are bound.

        What pods wait for is printed meanwhile. Ctrl-C removes everything. With `detach` it returns
        at once. If it raises LaunchError, nothing is left.
        """
        names, packed, objects = self._make(plan, options, suspended=True)
        api = Api.connect(self._context, self._namespace, timing=self._timing)
        try:
            pods = {names.job(label): self._pod(label) for label in names.groups}
            pods[names.supervisor_job] = self._pod(SUPERVISOR)
            if found := refusals(api, objects, names, pods):
                refused = f"the API server {api.server} refuses the run, nothing was created:"
                raise LaunchError("\n  ".join([refused, *found]))
            if self._detach:
                self._create(api, packed, objects)
                detached = KubernetesProgram(plan, options, api, names)
                detached.detach("run", names.run, f"is created in namespace {api.namespace}")
                return detached
            # Made first, because there may be no place for its logs.
            program = KubernetesProgram(
                plan,
                options,
                api,
                names,
                packed.order["key"],
                limits=WaitLimits(
                    options.notice_s, self._schedule_s, self._silence_s, self._launcher_silence_s
                ),
                is_launch=True,
                take_back=lambda: take_back(packed),
                log_dir=make_run_folder(plan.program, options.log_dir),
                timing=self._timing,
            )
            self._create(api, packed, objects)
        except BaseException:
            api.close()
            raise
        program.watch()
        program.await_up()
        return program

    def _create(self, api: Api, packed: PackedRun, objects: Sequence[Json]) -> None:
        """Creates all objects, or none.

        If what was made cannot be removed, the text of the error says so.
        """
        root, *others = objects
        author = secrets.token_hex(16)
        made: Json | None = None
        is_put = False
        try:
            made = api.create(root, author=author)
            put(packed)
            is_put = True
            for each in others:
                if each["kind"] != "Job":
                    api.create(owned(each, made))
            if self._queue is None:
                api.patch(root["kind"], root["metadata"]["name"], {"spec": {"suspend": False}})
            # Jobs come last: if this process is killed now, the supervisor gives up, and the cluster
            # removes the run. The cluster does not remove a run whose first object never began.
            for each in others:
                if each["kind"] == "Job":
                    api.create(owned(each, made))
        except BaseException as error:  # an interrupt, too
            left = self._remove(api, made, root, author, error)
            left += take_back(packed) if is_put else ""
            if left and isinstance(error, LaunchError):
                error.args = (f"{error}{left}", *error.args[1:])
            elif left:  # an interrupt has no text, and the text of an exit is not shown
                sys.stderr.write(
                    f"launchpad: the launch of {root['metadata']['name']} was interrupted{left}\n"
                )
            raise

    def _remove(
        self, api: Api, made: Json | None, root: Json, author: str, reason: BaseException
    ) -> str:
        """Deletes the first object of a run if we have created it; returns what remains, for people."""
        kind, name = root["kind"], root["metadata"]["name"]
        if made is None and isinstance(reason, ApiError) and (reason.status or 500) < 500:
            if reason.is_final or reason.attempts == 1:
                return ""  # it was refused, and no earlier attempt can have created it
        try:
            for _ in range(_LOOKS):
                if (found := made or api.get(kind, name)) is not None:
                    if created_by(found) == author:
                        api.delete(kind, name, uid=found["metadata"]["uid"])
                    break
                time.sleep(self._timing.look_s)
        except (ApiError, KeyboardInterrupt, SystemExit) as error:
            remains = "may remain" if made is None else "remains"
            why = str(error) if isinstance(error, ApiError) else "interrupted again"
            return (
                f"; what was created {remains} ({why}). Remove it: "
                f"kubectl delete {kind.lower()} {name} -n {api.namespace}"
            )
        return ""

    def attach(self, reference: str) -> RunningProgram:
        """Returns the run of this name, which was launched before, by this process or another."""
        api = Api.connect(self._context, self._namespace, timing=self._timing)
        try:
            root = api.get("Job", reference) or _jobset(api, reference)
            annotations = root["metadata"].get("annotations", {}) if root is not None else {}
            if root is None or PLAN_ANNOTATION not in annotations:
                raise LaunchError(
                    f"there is no run {reference!r} in namespace {api.namespace} of {api.server}"
                )
            plan, options = _plan_of(json.loads(annotations[PLAN_ANNOTATION]), self.name)
            names = Names.of(
                plan.program, plan.groups(), reference, jobset=root["kind"] == "JobSet"
            )
        except BaseException:
            api.close()
            raise
        program = KubernetesProgram(plan, options, api, names, timing=self._timing)
        program.watch()
        return program


_CREATE = """\
#!/bin/sh
# Creates all objects, and makes them belong to the first: deleting that removes all.
#   kubectl delete {kind} {name}
set -eu
cd "$(dirname "$0")"
# If this breaks off, nothing remains.
uid=
trap '[ -z "$uid" ] || kubectl delete {flags} {kind} {name} --wait=false' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
# The first object stays suspended until the others exist, because it needs them.
uid=$(kubectl patch --local -f {root} --type=merge -p '{{"spec":{{"suspend":true}}}}' -o json |
    kubectl create {flags} -f - -o 'jsonpath={{.metadata.uid}}')
owner='{{"metadata":{{"ownerReferences":[{{"apiVersion":"{api}","kind":"{kind}","name":"{name}","uid":"'"$uid"'"}}]}}}}'
create() {{
    kubectl patch --local -f "$1" --type=merge -p "$owner" -o json | kubectl create {flags} -f -
}}
# The Jobs of the nodes come last: without a supervisor, nothing would end their pods.
jobs="{jobs}"
for file in *.json; do
    case " {root} $jobs " in
        *" $file "*) ;;
        *) create "$file" ;;
    esac
done
{start}
for file in $jobs; do
    create "$file"
done
uid=
"""
_RESUME = """\
kubectl patch {flags} {kind} {name} --type=merge -p '{{"spec":{{"suspend":false}}}}'"""


def _seconds_mistakes(name: str, value: object, least: int, most: float) -> Iterator[str]:
    is_whole = most == _INT32_MAX
    kinds: Any = int if is_whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        number = "a whole number" if is_whole else "a number"
        yield f"{name} is {number} of seconds, at least {least}, not {value!r}"


def _jobset(api: Api, name: str) -> Json | None:
    try:
        return api.get("JobSet", name)
    except ApiError as error:
        if error.status == 403:  # users without JobSets need no right to read them
            return None
        raise


def _read_pods(
    given: Mapping[str, PodOptions | Mapping[str, Any]] | str | Path | None,
) -> dict[str, PodOptions]:
    if given is None:
        return {}
    if isinstance(given, str | Path):
        given = read_toml(Path(given))
    if not isinstance(given, Mapping):
        raise TypeError(f"pods is a dict of PodOptions by group, not {given!r}")
    mistakes = []
    found = {}
    for group, each in given.items():
        try:
            found[group] = PodOptions.of(each)
        except (TypeError, ValueError) as error:
            mistakes.append(f"pods[{group!r}]: {error}")
    if mistakes:
        raise ValueError("; ".join(mistakes))
    return found


def _with_ports(executables: Sequence[Executable]) -> list[Executable]:
    """Returns executables whose addresses all have a port: each executable has a pod of its own."""
    found = []
    for each in executables:
        taken = {address.port for address in each.addresses if address.port is not None}
        free = (port for port in range(FIRST_PORT, 1 << 16) if port not in taken)
        addresses = []
        for address in each.addresses:
            own = copy.copy(address)
            own.port = address.port if address.port is not None else next(free)
            addresses.append(own)
        found.append(dataclasses.replace(each, addresses=tuple(addresses)))
    return found


def _plan_of(found: Mapping[str, Any], launcher: str) -> tuple[LaunchPlan, LaunchOptions]:
    """Returns what is known of a run from outside: its nodes, without their work."""
    nothing = FrozenWork(b"", ())
    restart = RestartPolicy("on_failure" if found["begins_anew"] else "never")
    executables = tuple(
        Executable(label, replica, nothing, (), Resources(), "", restart=restart)
        for label, count in found["groups"].items()
        for replica in range(count)
    )
    plan = LaunchPlan(str(found["program"]), launcher, "pods of Kubernetes", executables)
    return plan, LaunchOptions(notice_s=float(found["notice_s"]))
