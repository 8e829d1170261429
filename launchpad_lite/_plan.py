"""From a program to what would be started: pure, nothing runs yet.

All mistakes of a program are found here, together, before anything starts.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from launchpad_lite._address import Address
from launchpad_lite._freeze import FrozenWork, HandleSearch, UnfreezableError, freeze, locate
from launchpad_lite._program import Program
from launchpad_lite._resources import Resources
from launchpad_lite.errors import ProgramError
from launchpad_lite.nodes.base import Handle, Node, PlanContext, Work
from launchpad_lite.nodes.python import SilentHandle

ResourcesByGroup = Mapping[str, Resources | Mapping[str, Any]]


@dataclass(frozen=True)
class Executable:
    """What a launcher starts; it knows no launcher.

    Attributes:
        label: Its group.
        replica: Its index in the group.
        work: What the worker does.
        addresses: Where it listens.
        resources: What it needs of its host.
        description: For people, like `CourierNode(Range)`.
        calls: Names of the executables it holds handles to.
    """

    label: str
    replica: int
    work: FrozenWork = field(repr=False)
    addresses: tuple[Address, ...]
    resources: Resources
    description: str
    calls: tuple[str, ...]

    @property
    def name(self) -> str:
        """`label[replica]`."""
        return f"{self.label}[{self.replica}]"


class LauncherTraits(Protocol):
    """What planning must know of a launcher; `launching.Launcher` has it."""

    name: str
    description: str
    shares_memory: bool

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Says what the launcher cannot honour."""

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Says what makes the start impossible."""


@dataclass(frozen=True)
class LaunchPlan:
    """What would start where. Made by `plan`; printed as a tree.

    Attributes:
        program: Name of the program.
        launcher: Name of the launcher.
        where: What the launcher is, for people.
        executables: What it starts, group by group.
        notes: What the launcher cannot honour.
    """

    program: str
    launcher: str
    where: str
    executables: tuple[Executable, ...]
    notes: tuple[str, ...] = ()

    @property
    def addresses(self) -> list[Address]:
        """All addresses that need a port."""
        return [address for each in self.executables for address in each.addresses]

    def groups(self) -> dict[str, list[Executable]]:
        """Returns the executables of each group by label."""
        grouped = itertools.groupby(self.executables, key=lambda each: each.label)
        return {label: list(members) for label, members in grouped}

    def __str__(self) -> str:
        lines = [f"{self.program}  ({self.launcher}: {self.where})"]
        groups = self.groups()
        for index, (label, members) in enumerate(groups.items()):
            last = index == len(groups) - 1
            lines.append(f"{'└' if last else '├'}── {_group_line(label, members)}")
            lines += [f"{' ' if last else '│'}   {line}" for line in _member_lines(members)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _group_line(label: str, members: Sequence[Executable]) -> str:
    resources = str(members[0].resources)
    count = f"{len(members)} node{'s' if len(members) > 1 else ''}"
    return f"{label}  {count}" + (f", each {resources}" if resources else "")


def _member_lines(members: Sequence[Executable]) -> Iterable[str]:
    for index, member in enumerate(members):
        branch = "└" if index == len(members) - 1 else "├"
        line = f"{branch}── {member.name}  {member.description}"
        if member.calls:
            line += f"  calls {', '.join(_shortened(member.calls))}"
        yield line


def _shortened(names: Sequence[str], most: int = 6) -> list[str]:
    if len(names) <= most:
        return list(names)
    return [*names[: most - 1], f"and {len(names) - most + 1} more"]


def make_plan(
    program: Program, launcher: LauncherTraits, resources: ResourcesByGroup | None = None
) -> LaunchPlan:
    """Plans the launch of a program.

    Raises:
        ProgramError: The program has mistakes; all are listed.
    """
    return _Planner(program, launcher, resources or {}).plan()


class _Planner:
    """Collects mistakes on the way, so that all are told at once."""

    def __init__(
        self, program: Program, launcher: LauncherTraits, resources: ResourcesByGroup
    ) -> None:
        self._program = program
        self._launcher = launcher
        self._mistakes: list[str] = []
        self._names = {
            node.key: f"{label}[{index}]"
            for label, nodes in program.groups.items()
            for index, node in enumerate(nodes)
        }
        self._search = HandleSearch()
        #: The executable that stands for a node; planned nodes only.
        self._executable_names: dict[str, str] = {}
        self._resources = self._check_resources(resources)

    def plan(self) -> LaunchPlan:
        if not self._program.get_all_nodes():
            self._mistakes.append("it has no nodes; add some with program.add_node(...)")
        drafts = [
            draft
            for label, nodes in self._program.groups.items()
            for draft in self._drafts_of_group(label, nodes)
        ]
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
        )

    def _check_resources(self, given: Any) -> dict[str, Resources]:
        checked: dict[str, Resources] = {}
        known = ", ".join(self._program.groups) or "none"
        if not isinstance(given, Mapping):  # users are not all checked by mypy
            self._mistakes.append(f"resources are a dict by group, not {given!r}")
            return checked
        for label, wishes in given.items():
            if label not in self._program.groups:
                self._mistakes.append(
                    f"resources for an unknown group {label!r}; the groups are: {known}"
                )
                continue
            try:
                checked[label] = Resources.of(wishes)
            except (TypeError, ValueError) as error:
                self._mistakes.append(f"resources of group {label!r}: {error}")
        return checked

    def _drafts_of_group(
        self, label: str, nodes: Sequence[Node[Any]]
    ) -> Iterable[tuple[Executable, Sequence[str]]]:
        replicas = itertools.count()
        for index, node in enumerate(nodes):
            name = f"{label}[{index}]"
            resources = self._resources.get(label, Resources())
            context = PlanContext(self._launcher.name, label, index, resources)
            try:
                tasks = node.to_executables(context)
            except ValueError as error:
                self._mistakes.append(f"{name}: {error}")
                continue
            for task in tasks:
                caller = f"{name} {task.description}"
                try:
                    work = freeze(
                        task.work, share=self._launcher.shares_memory, search=self._search
                    )
                except UnfreezableError as error:
                    self._mistakes.extend(f"{caller}: {mistake}" for mistake in error.mistakes)
                    self._callees(caller, task.work, error.handles)
                    continue
                callees = self._callees(caller, task.work, work.handles)
                addresses = tuple(task.addresses)
                executable = Executable(
                    label, next(replicas), work, addresses, resources, task.description, ()
                )
                self._executable_names.setdefault(node.key, executable.name)
                yield executable, callees

    def _with_calls(self, draft: Executable, callees: Sequence[str]) -> Executable:
        # Only now all have their names; a node need not have exactly one executable.
        names = [self._executable_names[key] for key in callees if key in self._executable_names]
        return dataclasses.replace(draft, calls=tuple(names))

    def _callees(self, caller: str, work: Work, handles: Sequence[Handle[Any]]) -> Sequence[str]:
        """Returns the keys of the nodes that handles stand for."""
        callees: dict[str, None] = {}
        for handle in handles:
            name = self._names.get(handle.node_key)
            if name is None:
                self._mistakes.append(
                    f"{caller}: {locate(work, handle)} is a handle to a node that was never "
                    "added; add it with program.add_node(node, label=...)"
                )
            elif isinstance(handle, SilentHandle):
                self._mistakes.append(
                    f"{caller}: {locate(work, handle)} is a handle to {name}, but a "
                    f"{handle.description} serves nothing; use lp.CourierNode for a node that "
                    "others call"
                )
            else:
                callees[handle.node_key] = None
        return tuple(callees)
