"""Makes the plan of a program. Pure: nothing runs yet.

All mistakes of a program are found here, together, before anything starts.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from launchpad_lite.errors import ProgramError
from launchpad_lite.graph.freeze import FrozenWork, UnfreezableError, freeze, locate
from launchpad_lite.graph.program import Program
from launchpad_lite.graph.python_process import PLAIN, PythonProcess
from launchpad_lite.graph.resources import Resources
from launchpad_lite.life.policies import NEVER, Liveness, RestartPolicy, RestartWhen
from launchpad_lite.nodes.base import NODES, DeclaredHandle, Handle, Node, PlanContext, Work
from launchpad_lite.nodes.python import SilentHandle
from launchpad_lite.parts.settings import did_you_mean
from launchpad_lite.process import flags
from launchpad_lite.worker.address import Address
from launchpad_lite.worker.checkpoints import Checkpoints
from launchpad_lite.worker.runtime import NodeSetup
from launchpad_lite.worker.state import NodeCheckpoints

if TYPE_CHECKING:
    from launchpad_lite.launching import Launcher

T = TypeVar("T")

ResourcesByGroup = Mapping[str, Resources | Mapping[str, Any]]
ProcessesByGroup = Mapping[str, PythonProcess | Mapping[str, Any]]
_Restart = RestartPolicy | RestartWhen | str
_Folder = str | os.PathLike[str]
RestartChoice = _Restart | Mapping[str, _Restart | Mapping[str, Any]] | None
LivenessChoice = Liveness | Mapping[str, Liveness | Mapping[str, Any]] | None
CheckpointsChoice = Checkpoints | _Folder | Mapping[str, Checkpoints | _Folder] | None


class LaunchSettings(NamedTuple):
    """The settings of nodes, as a user gave them.

    Each is a mapping whose keys are groups (`"actor"`) or single nodes (`"actor[3]"`), which
    override their group; or, except for resources and processes, one value for all nodes.
    """

    resources: ResourcesByGroup | None
    restart: RestartChoice
    liveness: LivenessChoice
    checkpoints: CheckpointsChoice
    processes: ProcessesByGroup | None
    seed: int | None


@dataclass(frozen=True)
class Executable:
    """A worker for a launcher to start; knows no launcher.

    Attributes:
        label: Its group.
        replica: Its index in the group.
        work: Its work.
        addresses: Where it listens.
        resources: Its needs.
        description: For people, like `CourierNode(Range)`.
        calls: Names of the executables it holds handles to.
        restart: When it restarts.
        liveness: How it shows that it is not hung.
        checkpoints: Where its state is kept, if it is.
        process: How its process is started.
        services: Names of external services to which it holds handles.
        together: Executables with the same word run on one host.
        seed: Of the program.
    """

    label: str
    replica: int
    work: FrozenWork = field(repr=False)
    addresses: tuple[Address, ...]
    resources: Resources
    description: str
    calls: tuple[str, ...] = ()
    restart: RestartPolicy = NEVER
    liveness: Liveness = field(default_factory=Liveness)
    checkpoints: NodeCheckpoints | None = None
    process: PythonProcess = PLAIN
    services: tuple[str, ...] = ()
    together: str | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """`label[replica]`."""
        return f"{self.label}[{self.replica}]"

    def setup(self, program: str, attempt: int, notice_s: float) -> NodeSetup:
        """Returns the settings of the node for its worker.

        Args:
            program: Name of the program.
            attempt: How many restarts came before.
            notice_s: Seconds it has to end after a request.
        """
        return NodeSetup(
            program,
            self.label,
            self.replica,
            attempt,
            notice_s,
            self.liveness,
            self.checkpoints,
            self.seed,
            self.restart.when is not RestartWhen.NEVER,
            is_traced=bool(flags.TRACE.value),
        )


class Service(NamedTuple):
    """A service that runs already and is part of the graph: nothing is started for it."""

    name: str
    description: str


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a launch: what starts where. Made by `plan`; prints as a tree.

    Attributes:
        program: Name of the program.
        launcher: Name of the launcher.
        where: The launcher, as text.
        executables: The executables, group by group.
        notes: Requests that the launcher cannot fulfil.
        services: External services.
        hosts: The host of each executable, by its name; empty if there is only one place.
        seed: The seed behind `lp.current_node().seed`.

    Example:
        ready = lp.plan(program)
        print(ready)
        for executable in ready.executables:
            print(executable.name, executable.resources)
    """

    program: str
    launcher: str
    where: str
    executables: tuple[Executable, ...]
    notes: tuple[str, ...] = ()
    services: tuple[Service, ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def addresses(self) -> list[Address]:
        """All addresses that need a port."""
        return [address for each in self.executables for address in each.addresses]

    def groups(self) -> dict[str, list[Executable]]:
        """Returns the executables of each group by label."""
        grouped = itertools.groupby(self.executables, key=lambda each: each.label)
        return {label: list(members) for label, members in grouped}

    def outline(self) -> "LaunchPlan":
        """Returns the plan without the work of its nodes, to read it without the user's code."""
        return self.with_works(dict.fromkeys(self.works, FrozenWork(b"", ())))

    @property
    def works(self) -> dict[str, FrozenWork]:
        """The work of each node, by its name, which `outline` leaves out."""
        return {each.name: each.work for each in self.executables}

    def with_works(self, works: Mapping[str, FrozenWork]) -> "LaunchPlan":
        """Returns the plan with other work, given for all nodes, by their names."""
        executables = tuple(
            dataclasses.replace(each, work=works[each.name]) for each in self.executables
        )
        return dataclasses.replace(self, executables=executables)

    def as_json(self) -> dict[str, Any]:
        """Returns the plan for `json.dumps`, without arguments and environments of nodes."""
        terms = ("description", "resources", "restart", "liveness")
        nodes = [
            {
                "name": each.name,
                **{name: str(getattr(each, name)) for name in terms},
                "host": self.hosts.get(each.name),
                "calls": [*each.calls, *each.services],
                "checkpoints": None if each.checkpoints is None else str(each.checkpoints.folder),
            }
            for each in self.executables
        ]
        services = [each._asdict() for each in self.services]
        about = {"program": self.program, "launcher": self.launcher, "where": self.where}
        return {**about, "nodes": nodes, "services": services, "notes": [*self.notes]}

    def __str__(self) -> str:
        lines = [f"{self.program}  ({self.launcher}: {self.where})"]
        branches = [self._branch(label, members) for label, members in self.groups().items()]
        branches += [
            (f"{each.name}  {each.description}  runs already", []) for each in self.services
        ]
        for index, (line, below) in enumerate(branches):
            last = index == len(branches) - 1
            lines.append(f"{'└' if last else '├'}── {line}")
            lines += [f"{' ' if last else '│'}   {each}" for each in below]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _branch(self, label: str, members: Sequence[Executable]) -> tuple[str, list[str]]:
        """Returns the line of a group, and those of its nodes."""
        common, *others = {_terms(member) for member in members}
        head = f"{label}  {len(members)} node{'s' if len(members) > 1 else ''}"
        if common and not others:
            head += f", each {common}"
        below = []
        for member in members:
            line = f"{'└' if member is members[-1] else '├'}── {member.name}  {member.description}"
            if member.name in self.hosts:
                line += f"  on {self.hosts[member.name]}"
            if others and _terms(member):
                line += f"  {_terms(member)}"
            if callees := (*member.calls, *member.services):
                line += f"  calls {', '.join(first_few(callees))}"
            below.append(line)
        return head, below


def _terms(member: Executable) -> str:
    kept = member.checkpoints
    parts = [*map(str, (member.resources, member.process, member.restart, member.liveness))]
    if kept is not None:
        period = f" every {kept.period_s:g} s" if kept.period_s is not None else ""
        parts.append(f"checkpoints{period} in {kept.folder.parent.parent}")
    return "; ".join(part for part in parts if part)


def first_few(names: Sequence[str]) -> Sequence[str]:
    """Returns six names at most; the last may say how many more there are."""
    return names if len(names) <= 6 else [*names[:5], f"and {len(names) - 5} more"]


#: Checked settings by group (`"actor"`) and single node (`"actor[3]"`); by None, that of all others.
_ByNode = Mapping[str | None, T]


def _of(settings: _ByNode[T], label: str, name: str) -> T:
    return settings.get(name, settings.get(label, settings[None]))


class Planner:
    """Plans the launch of a program; collects mistakes on the way, to report all at once."""

    def __init__(self, program: Program, launcher: "Launcher", settings: LaunchSettings) -> None:
        self._program = program
        self._launcher = launcher
        self._mistakes: list[str] = []
        self._names = {
            part.key: f"{label}[{index}]"
            for label, nodes in program.groups.items()
            for index, node in enumerate(nodes)
            for part in node.with_inner()
        }
        #: Objects without handles, by id.
        self._bare: dict[int, object] = {}
        #: The executable that runs a node; planned nodes only.
        self._executable_names: dict[str, str] = {}
        #: External services, by the keys of their nodes.
        self._services: dict[str, Service] = {}
        self._resources = self._check("resources", settings.resources, Resources.of, Resources())
        self._processes = self._check("processes", settings.processes, PythonProcess.of, PLAIN)
        self._restart = self._check("restart", settings.restart, RestartPolicy.of, None)
        self._seed = self._parse("seed", settings.seed, _seed_of, 0)
        self._liveness = self._check("liveness", settings.liveness, Liveness.of, Liveness())
        #: Whether a node may have a state to keep.
        self._keeps_state = False
        self._checkpoints = self._check("checkpoints", settings.checkpoints, _checkpoints_of, None)

    def plan(self) -> LaunchPlan:
        """Returns the plan, or raises a ProgramError with all mistakes."""
        if not self._program.get_all_nodes():
            self._mistakes.append("it has no nodes; add some with program.add_node(...)")
        drafts = [
            draft
            for label, nodes in self._program.groups.items()
            for draft in self._drafts_of_group(label, nodes)
        ]
        if self._checkpoints[None] is not None and drafts and not self._keeps_state:
            self._mistakes.append(
                "checkpoints are asked for, but no node has both save(folder) and restore(folder)"
            )
        executables = tuple(self._with_calls(*draft) for draft in drafts)
        if not self._mistakes:
            self._mistakes.extend(self._launcher.mistakes(executables))
        if self._mistakes:
            raise ProgramError(self._program.name, self._mistakes)
        return LaunchPlan(
            self._program.name,
            self._launcher.name,
            self._launcher.description,
            executables,
            tuple(self._launcher.notes(executables)),
            tuple(self._services.values()),
            self._launcher.placement(executables),
            self._seed,
        )

    def _check(self, what: str, given: Any, parse: Callable[[Any], T], otherwise: T) -> _ByNode[T]:
        checked: dict[str | None, T] = {None: otherwise}
        if given is None:
            return checked
        if not isinstance(given, Mapping):
            if what in ("resources", "processes"):  # not all users run mypy
                self._mistakes.append(f"{what} are a dict by group, not {given!r}")
            else:
                checked[None] = self._parse(what, given, parse, otherwise)
            return checked
        known = {*self._program.groups, *self._names.values()}
        for key, value in given.items():
            kind = "node" if isinstance(key, str) and key.endswith("]") else "group"
            if key in known:
                checked[key] = self._parse(f"{what} of {kind} {key!r}", value, parse, otherwise)
            else:
                groups = ", ".join(self._program.groups) or "none"
                self._mistakes.append(
                    f"{what} for an unknown {kind} {key!r}{did_you_mean(key, known)}; "
                    f"the groups are: {groups}"
                )
        return checked

    def _parse(self, what: str, value: Any, parse: Callable[[Any], T], otherwise: T) -> T:
        try:
            return parse(value)
        except (TypeError, ValueError) as error:
            self._mistakes.append(f"{what}: {error}")
            return otherwise

    def _drafts_of_group(
        self, label: str, nodes: Sequence[Node[Any]]
    ) -> Iterable[tuple[Executable, Sequence[str]]]:
        replicas = itertools.count()
        for index, node in enumerate(nodes):
            name = f"{label}[{index}]"
            resources = _of(self._resources, label, name)
            kept = _of(self._checkpoints, label, name)
            must_keep = name in self._checkpoints or label in self._checkpoints
            context = PlanContext(self._launcher.name, label, index, resources, kept is not None)
            try:
                tasks = node.to_executables(context)
            except ValueError as error:
                self._mistakes.append(f"{name}: {error}")
                continue
            if not tasks:
                self._services[node.key] = Service(name, node.description)
            for task in tasks:
                caller = f"{name} {task.description}"
                try:
                    work = freeze(task.work, share=self._launcher.shares_memory, bare=self._bare)
                except UnfreezableError as error:
                    self._mistakes.extend(f"{caller}: {mistake}" for mistake in error.mistakes)
                    self._callees(caller, task.work, error.handles)
                    continue
                if task.may_keep_state:
                    self._keeps_state = True
                elif must_keep:
                    self._mistakes.append(
                        f"{caller}: checkpoints are asked for, but it does not have both save(folder) "
                        "and restore(folder)"
                    )
                callees = self._callees(caller, task.work, work.handles)
                # Nodes that run together are one executable, whose parts the graph does not show.
                callees = [key for key in callees if key not in task.stands_for]
                replica = next(replicas)
                state = None
                if kept is not None:
                    folder = kept.folder / label / str(replica)
                    state = NodeCheckpoints(folder, kept.period_s, kept.keep, required=must_keep)
                executable = Executable(
                    label,
                    replica,
                    work,
                    tuple(task.addresses),
                    resources,
                    task.description,
                    restart=_of(self._restart, label, name) or task.restart or NEVER,
                    liveness=_of(self._liveness, label, name),
                    checkpoints=state,
                    process=_of(self._processes, label, name),
                    together=task.together,
                    seed=self._seed,
                )
                for address in task.addresses:
                    address.node = executable.name
                for key in (*task.stands_for, node.key):
                    self._executable_names.setdefault(key, executable.name)
                yield executable, callees

    def _with_calls(self, draft: Executable, callees: Sequence[str]) -> Executable:
        # Only now all names are known, because a node may have several executables or none.
        names = dict.fromkeys(filter(None, map(self._executable_names.get, callees)))
        services = dict.fromkeys(self._services[k].name for k in callees if k in self._services)
        return dataclasses.replace(draft, calls=tuple(names), services=tuple(services))

    def _callees(self, caller: str, work: Work, handles: Sequence[Handle[Any]]) -> Sequence[str]:
        """Returns the keys of the nodes of handles."""
        callees: dict[str, None] = {}
        for handle in handles:
            name, node = self._names.get(handle.node_key), NODES.get(handle.node_key)
            target = handle.target if isinstance(handle, DeclaredHandle) else handle
            if isinstance(handle, DeclaredHandle) and target is None:
                wrong = (
                    f"{handle.name}, which was declared, but never added; add it with "
                    "program.add_node(node, label=...)"
                )
            elif name is None and node is not None and node._added_to:
                wrong = (
                    f"a node of another program, {node._added_to!r}; nodes call those of their own "
                    "program only"
                )
            elif name is None:
                wrong = "a node that was never added; add it with program.add_node(node, label=...)"
            elif isinstance(target, SilentHandle):
                wrong = (
                    f"{name}, but a {target.description} serves nothing; use lp.CourierNode for a "
                    "node that others call"
                )
            else:
                callees[handle.node_key] = None
                continue
            self._mistakes.append(f"{caller}: {locate(work, handle)} is a handle to {wrong}")
        return tuple(callees)


def _checkpoints_of(given: Checkpoints | _Folder) -> Checkpoints | None:
    return given if isinstance(given, Checkpoints) else Checkpoints(given)


def _seed_of(given: object) -> int:
    if given is None:
        return int.from_bytes(os.urandom(4), "big")
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(f"it is a whole number from 0 on, not {given!r}")
    return given
