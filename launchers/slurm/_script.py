"""Writes commands and scripts for Slurm, and reads its answers. Pure: nothing runs here."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.hosts.placement import together
from launchpad_lite.launching import Executable

#: Memory beside that of the nodes, for the agent and, on the first host, the supervisor, in MiB.
_OWN_MIB = 512
#: Paths without characters that sbatch treats specially, in lines and in file names with %.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+@:,=-]*")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")
#: States after which Slurm has nothing more to do with a job.
_OVER = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)


@dataclass(frozen=True)
class Component:
    """Hosts of one kind, which Slurm calls nodes, and the names of the executables on them.

    The resources are those of each host; None: Slurm's default.
    """

    executables: tuple[str, ...]
    nodes: int
    cpu: int | None = None
    ram_gib: float | None = None
    gpu: int | None = None

    def __str__(self) -> str:
        wishes = {"cpu": self.cpu, "ram_gib": self.ram_gib, "gpu": self.gpu}
        asked = ", ".join(
            f"{name}={value:g}" for name, value in wishes.items() if value is not None
        )
        hosts = f"{self.nodes} host{'s' if self.nodes > 1 else ''}"
        counts = Counter(name.partition("[")[0] for name in self.executables)
        nodes = ", ".join(f"{count} x {label}" for label, count in counts.items())
        return f"{hosts}{f', each {asked}' if asked else ''}: {nodes}"

    @property
    def limit_gib(self) -> float | None:
        """Memory of each host in GiB, with a reserve, so that the nodes fit despite rounding."""
        return None if self.ram_gib is None else self.ram_gib + 1 / 1024


#: Executables that share a host.
_Unit = tuple[Executable, ...]


def components_of(
    executables: Sequence[Executable], nodes: int | Mapping[str, int] | None
) -> list[Component]:
    """Divides a program into components of a heterogeneous job: one for each resource shape.

    `nodes` says how many hosts: in all, or by group. A group that is named has hosts of its own.
    None: one for each shape. It raises ValueError if groups or numbers do not fit the program.
    """
    by_group = nodes if isinstance(nodes, Mapping) else {}
    labels = list(dict.fromkeys(each.label for each in executables))
    if unknown := [label for label in by_group if label not in labels]:
        raise ValueError(
            f"nodes= names {', '.join(map(repr, unknown))}; the groups are: {', '.join(labels)}"
        )
    shapes: dict[object, list[_Unit]] = {}
    for unit in together(executables):
        named = [label for label in by_group if label in {each.label for each in unit}]
        if len(named) > 1:
            raise ValueError(
                f"nodes= gives {' and '.join(named)} hosts of their own, but {unit[0].name} and "
                "others of these groups run together on one host; name one of the groups"
            )
        shapes.setdefault((*named, _shape(unit)), []).append(unit)
    if by_group:
        counts = [by_group.get(str(key[0]), 1) for key in shapes]  # type: ignore[index]
    else:
        assert nodes is None or isinstance(nodes, int)
        counts = _divided(len(shapes) if nodes is None else nodes, list(shapes.values()))
    for units, count in zip(shapes.values(), counts, strict=True):
        if not 1 <= count <= len(units):
            raise ValueError(
                f"nodes={nodes!r} gives {count} hosts to {len(units)} that are to be placed there "
                f"({units[0][0].name}{', ...' if len(units) > 1 else ''}); it must be 1 to "
                f"{len(units)}"
            )
    return [_component(units, count) for units, count in zip(shapes.values(), counts, strict=True)]


def _shape(unit: _Unit) -> tuple[float | None, ...]:
    """Returns the cores, memory and accelerators that all executables of a unit need in sum."""
    shape: list[float | None] = []
    for name in ("cpu", "ram_gib", "gpu"):
        wishes = [getattr(each.resources, name) for each in unit]
        known = [wish for wish in wishes if wish is not None]
        shape.append(sum(known) if known else None)
    return tuple(shape)


def _divided(total: int, shapes: Sequence[Sequence[_Unit]]) -> list[int]:
    """Divides hosts: one for each shape, then each further one where the most units share a host."""
    if total < len(shapes):
        raise ValueError(
            f"nodes={total}, but the program has {len(shapes)} groups of nodes that ask for "
            f"different resources, and each needs hosts of its own; ask for {len(shapes)} or more, "
            "or for the same resources"
        )
    if total > (most := sum(map(len, shapes))):
        raise ValueError(f"nodes={total}, but there are only {most} nodes to place on them")
    counts = [1] * len(shapes)
    for _ in range(total - len(shapes)):
        fullest = max(range(len(shapes)), key=lambda i: len(shapes[i]) / counts[i])
        counts[fullest] += 1
    return counts


def _component(units: Sequence[_Unit], nodes: int) -> Component:
    share = math.ceil(len(units) / nodes)
    cpu, ram_gib, gpu = _shape(units[0])
    return Component(
        tuple(each.name for unit in units for each in unit),
        nodes,
        # At least one core, because a host without one runs nothing.
        None if cpu is None else max(1, math.ceil(share * cpu)),
        None if ram_gib is None else share * ram_gib,
        None if gpu is None else _devices(share, gpu),
    )


def _devices(count: int, each: float) -> int:
    if 0 < each < 1:  # several share a device, none has parts of two
        return math.ceil(count / int(1 / each + 1e-9))
    return math.ceil(count * each)


@dataclass(frozen=True)
class Submission:
    """The user's options for the batch system, the same for all components.

    `options` are those of sbatch by name. `gres` is asked for on hosts whose nodes need
    accelerators, by default `gpu:N`. The program is asked to stop `notice_s` before the time limit.
    """

    options: Mapping[str, str | None]
    gres: str | None
    notice_s: int
    requeue: bool
    extra: tuple[str, ...]

    def mistakes(self) -> list[str]:
        """Returns the options that sbatch would refuse or misread."""
        found = [
            f"{name} is a text for sbatch's --{name}, on one line, not {value!r}"
            for name, value in {**self.options, "gres": self.gres}.items()
            if value is not None and not _is_value(value)
        ]
        if not 1 <= self.notice_s <= 65535:  # Slurm's own limit
            found.append(f"signal_s is 1 to 65535 seconds, not {self.notice_s}")
        found += [
            f"extra: {option!r} is no option of sbatch; write them like '--exclusive' or "
            "'--mail-user=me@example.org', without quotes"
            for option in self.extra
            if not _OPTION.fullmatch(option) or not _is_value(option)
        ]
        return found

    def lines(self, component: Component) -> list[str]:
        # Hosts without accelerators ask for no GPUs, but for all other resources.
        gres = None if self.gres is None or self.gres.startswith("gpu") else self.gres
        if component.gpu:
            gres = self.gres or f"gpu:{component.gpu}"
        mib = None if component.ram_gib is None else math.ceil(component.ram_gib * 1024) + _OWN_MIB
        wishes: dict[str, object] = {
            **self.options,
            "nodes": component.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": component.cpu,
            "mem": mib and f"{mib}M",
            "gres": gres,
        }
        options = [f"--{name}={value}" for name, value in wishes.items() if value is not None]
        return [_directive(option) for option in (*options, *self.extra)]


def _is_value(value: object) -> bool:
    return (
        isinstance(value, str)
        and bool(value)
        and value.isprintable()
        and not set(value) & set("\"'\\`$")
    )


def _directive(option: str) -> str:
    # Quoted, because sbatch splits at blanks and ends the line at a #.
    if set(option) & set(" #"):
        name, equals, value = option.partition("=")
        option = f'{name}{equals}"{value}"'
    return f"#SBATCH {option}"


def path_mistake(path: Path) -> str | None:
    if _PLAIN_PATH.fullmatch(str(path)):
        return None
    return (
        f"{str(path)!r} has characters in it that sbatch reads as something else; name a folder of "
        "letters, digits and . _ - + @ : , ="
    )


def batch_script(
    program: str,
    folder: Path,
    directory: Path,
    python: str,
    components: Sequence[Component],
    submission: Submission,
) -> str:
    """Returns the script for sbatch. All hosts see `folder`; nodes run in `directory`."""
    first, *others = (submission.lines(component) for component in components)
    common = [
        # Other characters are replaced, because sbatch does not accept all names.
        f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '_', program)}",
        f"--chdir={directory}",
        f"--output={folder}/job.out",
        "--open-mode=append",
        f"--signal=B:TERM@{submission.notice_s}",
        "--requeue" if submission.requeue else "--no-requeue",
    ]
    lines = [*(f"#SBATCH {option}" for option in common), *first]
    for other in others:
        lines += ["#SBATCH hetjob", *other]
    begin = shlex.quote(f"{folder}/begin.py")
    return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.quote(python)} {begin}", ""])


def node_lists(environment: Mapping[str, str]) -> list[tuple[int | None, str]]:
    """Returns the hosts of this allocation as Slurm writes them, by component; None: the only one."""
    count = int(environment.get("SLURM_HET_SIZE") or 0)
    if count:
        return [(k, environment[f"SLURM_JOB_NODELIST_HET_GROUP_{k}"]) for k in range(count)]
    return [(None, environment["SLURM_JOB_NODELIST"])]


def srun_command(
    host: str, het_group: int | None, cpu: int | None, command: Sequence[str]
) -> list[str]:
    """Returns the command that runs another one on a host, connected to our input and output.

    The component of the host is None if there is only one. Without `cpu`, the command has all cores
    that the allocation has there.
    """
    return [
        "srun",
        *(() if het_group is None else (f"--het-group={het_group}",)),
        "--nodes=1",
        "--ntasks=1",
        # The whole environment of the job, because nodes need its PATH.
        "--export=ALL",
        f"--nodelist={host}",
        *(() if cpu is None else (f"--cpus-per-task={cpu}",)),
        # Shares the host with the supervisor, with all memory of the job there.
        "--overlap",
        "--mem=0",
        # Otherwise srun holds output back until the end of a line, and frames have no lines.
        "--unbuffered",
        "--input=0",
        "--kill-on-bad-exit=0",
        "--quiet",
        "--job-name=agent",
        *command,
    ]


@dataclass(frozen=True)
class JobState:
    """The state of a job, as Slurm reports it: like RUNNING.

    The exit code has that of the script and its signal, like 0:9. The host is where the script runs
    or ran; empty before.
    """

    state: str
    reason: str = "None"
    exit_code: str = "0:0"
    batch_host: str = ""
    output: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    @property
    def waits(self) -> bool:
        """Whether it has not begun, or is to begin again."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    def describe(self) -> str:
        parts = [] if self.reason in ("None", "(null)", "") else [self.reason]
        if self.exit_code != "0:0":
            parts.append(f"exit code {self.exit_code}")
        return f"{self.state} ({', '.join(parts)})" if parts else self.state


def read_job(answer: str) -> JobState:
    """Reads the answer of `scontrol --oneliner show job`: a line for each component.

    The first component runs the script, so its state counts, unless another component failed.
    """
    states = [_read_line(line) for line in answer.splitlines() if line.strip()]
    if not states:
        raise ValueError("Slurm said nothing of the job")
    first = states[0]
    unlike = Counter(each.state for each in states if each.is_over)
    if first.is_over and len(unlike) > 1:
        telling = (each for each in states if each.state not in ("COMPLETED", "CANCELLED"))
        return next(telling, first)
    return first


def _read_line(line: str) -> JobState:
    fields: dict[str, str] = {}
    for name, value in re.findall(r"(?:^|\s)(\w+)=(\S*)", line):
        fields.setdefault(name, value)
    if not fields.get("JobState"):
        raise ValueError(f"this is no job: {line!r}")
    return JobState(
        fields["JobState"],
        fields.get("Reason", "None"),
        fields.get("ExitCode", "0:0"),
        fields.get("BatchHost", ""),
        fields.get("StdOut", ""),
    )


def unique_names(hosts: Iterable[tuple[int | None, str]]) -> dict[str, tuple[int | None, str]]:
    """Gives each host of each component a unique name: its own, if only one component has it."""
    hosts = list(hosts)
    counts = Counter(name for _, name in hosts)
    return {
        name if counts[name] == 1 else f"{name}-component{group}": (group, name)
        for group, name in hosts
    }
