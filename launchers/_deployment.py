"""From hosts that have been reached to a running program: what SSH and Slurm have in common.

In this order: what is each host; what code does it lack; its agent; what may be used of it; which
node runs where; by which addresses do hosts reach each other; ports; certificates; the nodes.
Nothing is started before all hosts have passed all of it, and what is wrong with any of them is
told together.
"""

import contextlib
import dataclasses
import enum
import math
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from courier import Secret, TlsCredentials
from launchers._allotment import allot
from launchers._console import Console, Output
from launchers._fleet import Fleet
from launchers._hosts import HostSpec
from launchers._logs import NodeLogs
from launchers._payloads import payloads
from launchers._placement import PlacementChoice, Room, Strategy, place
from launchers._ports import endpoint
from launchers._reachability import LAUNCHER, Views, choose_addresses
from launchers._run_folder import make_run_folder
from launchers._shipping import Shipment, Tree
from launchers._supervisor import SupervisedProgram
from launchers._trust import Authority, refuse_clock
from launchers._tunnels import Tunnels
from launchers.host.arrival import Arrival, Facts, Hello, HostError
from launchers.host.grant import Grant
from launchers.host.link import Frame
from launchers.host.machine import Machine
from launchers.host.probe import WORD_BYTES, Target, reach
from launchers.host.remote import AgentHost
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    Executable,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)

T = TypeVar("T")
R = TypeVar("R")

#: Servers listen on all interfaces: which one is called was found out by trying. Each peer must
#: have a certificate of the program, and prove its secret.
_LISTEN_HOST = "0.0.0.0"  # noqa: S104
#: Seconds after which a host is taken for out of reach: a first packet that was lost is sent again
#: after one.
_REACH_S = 3.2
#: Seconds after the loss of a host was to be noticed until all know of it.
_LATER_S = 1.0
#: Hosts that are spoken with at the same time, each by a thread that mostly waits.
_MOST_AT_ONCE = 1024
#: What to do about a Python of another version.
_OTHER_PYTHON = "Name another interpreter, as in hosts=['h1:python=/path/to/python{0}'], or python= for all hosts"
_OTHER_IMAGE = "Use an image that has Python {0}, or launch with the Python of the image"
#: Seconds in which the agent comes up once its code is there.
_AGENT_S = 60.0


MakeFleet = Callable[["Starter", SupervisedProgram], Fleet]
ReachHost = Callable[[HostSpec, Hello], Arrival]
Issue = Callable[[str, Sequence[str]], TlsCredentials]


class Tunnel(enum.Enum):
    """When calls between hosts go through the links of their agents, by way of the launcher."""

    AUTO = "auto"  # where a host does not reach another
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True)
class Deployment:
    """What is wanted of the hosts.

    Attributes:
        plan: What to launch.
        options: How.
        specs: The hosts.
        choice: Which nodes may run where.
        strategy: How others are placed.
        shipment: Code that is needed there.
        tunnel: When calls between hosts go through the links of their agents.
        silence_s: Seconds after which a host that says nothing is lost, and ends what it runs.
        requirements: What to install there, as `pip install --requirement` takes it.
        cache: Folder there for code; None: the user's.
        ways: How hosts reach each other, where that is known; None: it is tried.
        issue: Makes certificates for who is called by these names; None: an authority is made for
            the run.
        output: Shows what nodes print; None: this process's output, unless it is to be quiet.
        keeps_logs: Whether what nodes print is kept in files.
        in_pods: Whether each host is the pod of one node.
    """

    plan: LaunchPlan
    options: LaunchOptions
    specs: tuple[HostSpec, ...]
    choice: PlacementChoice
    strategy: Strategy
    shipment: Shipment
    tunnel: Tunnel
    silence_s: float
    requirements: str | None = None
    cache: str | None = None
    ways: Views | None = None
    issue: Issue | None = None
    output: Output | None = None
    keeps_logs: bool = True
    in_pods: bool = False

    def hello(self) -> Hello:
        """Returns what a host must know first."""
        return Hello(
            tuple(tree.key for tree in self.shipment.trees),
            tuple(self.shipment.requires),
            self.silence_s,
            self.requirements,
            self.cache,
            self.in_pods,
        )


def deploy(
    deployment: Deployment,
    reach_host: ReachHost,
    limit_s: float,
    make_fleet: MakeFleet | None = None,
) -> RunningProgram:
    """Starts a program on several hosts; returns when its addresses are known and bound.

    Args:
        deployment: What is wanted.
        reach_host: Starts a bare interpreter on a host.
        limit_s: Seconds within which each must have answered.
        make_fleet: Puts the hosts together, once their nodes are placed.

    Raises:
        LaunchError: It cannot be started; nothing of it is left.
    """
    # First, because the package for it may be missing.
    issue = deployment.issue or Authority(deployment.plan.program).issue
    if deployment.output is None and not deployment.options.quiet:
        deployment = dataclasses.replace(deployment, output=Console())
    with contextlib.ExitStack() as undo:
        hosts = _bring_up(deployment, deployment.specs, reach_host, limit_s, undo)
        survey = _survey(deployment, hosts)
        program = Starter(deployment, hosts, survey, issue, reach_host).start(undo, make_fleet)
        undo.pop_all()
    return program


def _bring_up(
    deployment: Deployment,
    specs: Iterable[HostSpec],
    reach_host: ReachHost,
    limit_s: float,
    undo: contextlib.ExitStack,
) -> dict[str, AgentHost]:
    """Returns hosts with their agents, by name."""
    hello = deployment.hello()
    arrivals = []
    for spec in specs:
        arrivals.append(reach_host(spec, hello))
        undo.callback(arrivals[-1].close)
    _ship(deployment, arrivals, time.monotonic() + limit_s)
    hosts = {}
    for arrival in arrivals:
        link = arrival.link(deployment.silence_s)
        hosts[arrival.name] = AgentHost(arrival.name, link, deployment.output)
        undo.callback(hosts[arrival.name].close)
    undo.callback(_begin_to_close, hosts.values())
    return hosts


def allow_many_files() -> None:
    """Raises the soft limit, which is for programs that use select: each host holds some open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_requirements(path: Path | None) -> str | None:
    """Returns the text of a file of requirements, if there is one.

    Raises:
        LaunchError: It cannot be read.
    """
    if path is None:
        return None
    try:
        return path.read_text()
    except OSError as error:
        raise LaunchError(f"cannot read the requirements: {error}") from error


def _begin_to_close(hosts: Iterable[AgentHost]) -> None:
    for host in hosts:
        host.begin_to_close()


def _attempt_all(do: Callable[[T], R], items: Iterable[T]) -> tuple[list[R | None], list[str]]:
    """Does something with all hosts at once; returns what came of it, and all mistakes."""
    todo = list(items)
    results: list[R | None] = []
    mistakes = []
    pool = ThreadPoolExecutor(max(1, min(_MOST_AT_ONCE, len(todo))))
    try:
        for future in [pool.submit(do, item) for item in todo]:
            try:
                results.append(future.result())
            except LaunchError as error:
                results.append(None)
                mistakes.append(str(error))
    except BaseException:  # an interrupt: the caller ends what they wait for
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return results, mistakes


def _on_all(do: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Does something with all hosts at once; raises all mistakes as one."""
    results, mistakes = _attempt_all(do, items)
    _refuse(mistakes)
    return cast("list[R]", results)


def _refuse(mistakes: Sequence[str]) -> None:
    if mistakes:
        raise LaunchError("\n".join(mistakes))


# Code


def _ship(deployment: Deployment, arrivals: Sequence[Arrival], give_up_at: float) -> None:
    """Brings the agents up, with all the code that is needed."""
    answers, mistakes = _attempt_all(lambda arrival: arrival.facts(give_up_at), arrivals)
    facts = {
        arrival.name: answer
        for arrival, answer in zip(arrivals, answers, strict=True)
        if answer is not None
    }
    here = Facts.here()
    mistakes += [
        f"{name}: {mistake}"
        for name, there in facts.items()
        for mistake in mismatches(
            here, there, deployment.shipment.requires, in_pods=deployment.in_pods
        )
    ]
    _refuse(mistakes)
    trees = {tree.key: tree for tree in deployment.shipment.trees}
    archives = _Archives(trees)

    def ship(arrival: Arrival) -> None:
        arrival.ship({key: archives[key] for key in facts[arrival.name].missing})
        arrival.await_agent(time.monotonic() + _AGENT_S)

    _on_all(ship, arrivals)


class _Archives(dict[str, bytes]):
    """Archives of trees, each made when it is first asked for."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        super().__init__()
        self._trees = trees
        self._lock = threading.Lock()

    def __missing__(self, key: str) -> bytes:
        with self._lock:
            if key not in self:
                self[key] = self._trees[key].archive()
        return self[key]


def mismatches(
    here: Facts, there: Facts, requires: Mapping[str, str], *, in_pods: bool = False
) -> Iterator[str]:
    """Returns why code of this process cannot run at a host.

    Args:
        here: Facts of this process.
        there: Facts of the host.
        requires: Packages that are needed there, in the versions of this process.
        in_pods: Whether the host is a pod. What its image has is its maker's choice: another
            version of a package, or another platform, is none of the mistakes.
    """
    wanted = f"{here.implementation} {_dotted(here.python[:2])}"
    found = f"{there.implementation} {_dotted(there.python[:2])}"
    if found != wanted:
        remedy = (_OTHER_IMAGE if in_pods else _OTHER_PYTHON).format(_dotted(here.python[:2]))
        yield (
            f"{there.executable} is {there.implementation} {_dotted(there.python)}, the program is "
            f"launched by {_dotted(here.python)}: code travels between the same minor versions "
            f"only. {remedy}"
        )
        return
    if there.platform != here.platform and not in_pods:
        yield (
            f"it is a {'-'.join(filter(None, there.platform))}, the program is launched from a "
            f"{'-'.join(filter(None, here.platform))}; what is shipped would not run there"
        )
    differing = [
        f"{name} {version} ({there.packages.get(name) or 'none'} there)"
        for name, version in requires.items()
        if there.packages.get(name) != version and not (in_pods and there.packages.get(name))
    ]
    if differing and in_pods:
        yield (
            f"the program needs {', '.join(differing)} in {there.executable} of its image. Install "
            "them there (as examples/Dockerfile does), or name another image"
        )
    elif differing:
        yield (
            f"the program needs {', '.join(differing)} in {there.executable}. Install the same "
            "versions there, name an interpreter that has them (python=), or let the launcher "
            "install them (requirements='requirements.txt')"
        )


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


# Hosts


@dataclass
class _Survey:
    """What hosts have, and how they reach each other."""

    machines: dict[str, Machine]
    views: Views


def _survey(deployment: Deployment, hosts: Mapping[str, AgentHost]) -> _Survey:
    """Asks hosts what they have, and how they reach each other unless that is known."""
    words = {name: secrets.token_hex(WORD_BYTES) for name in hosts}
    answers = _on_all(
        lambda host: host.ask(
            Frame("survey", {"word": words[host.name], "listen_host": _LISTEN_HOST})
        ),
        hosts.values(),
    )
    found = dict(zip(hosts, answers, strict=True))
    if deployment.issue is None:  # otherwise they have used their certificates by now
        now_s = time.time()
        clocks = (refuse_clock(name, found[name]["time_s"], now_s) for name in hosts)
        _refuse([mistake for mistake in clocks if mistake is not None])
    machines, targets = {}, {}
    for spec in deployment.specs:
        if spec.name not in hosts:
            continue
        answer = found[spec.name]
        machine = Machine.decode(answer["machine"], spec.name)
        machines[spec.name] = machine.limited(cpu=spec.cpu, ram_gib=spec.ram_gib, gpu=spec.gpu)
        addresses = (spec.address,) if spec.address else tuple(answer["addresses"])
        targets[spec.name] = Target(spec.name, addresses, answer["port"], words[spec.name])
    if deployment.ways is not None:
        return _Survey(machines, deployment.ways)
    # Agents that try to reach others say nothing meanwhile.
    timeout_s = max(1.0, min(_REACH_S, deployment.silence_s / 2))
    return _Survey(machines, _probe(targets, hosts, timeout_s))


def _probe(
    targets: Mapping[str, Target], hosts: Mapping[str, AgentHost], timeout_s: float
) -> Views:
    def probe(host: AgentHost | None) -> Mapping[str, Sequence[str]]:
        if host is None:
            return reach(list(targets.values()), None, timeout_s)
        others = [dataclasses.asdict(each) for each in targets.values() if each.name != host.name]
        question = Frame("probe", {"targets": others, "timeout_s": timeout_s})
        reached: Mapping[str, Sequence[str]] = host.ask(question)["reached"]
        return reached

    reached = _on_all(probe, [None, *hosts.values()])
    return choose_addresses(
        {name: target.addresses for name, target in targets.items()},
        dict(zip([LAUNCHER, *hosts], reached, strict=True)),
    )


# The program


class Starter:
    """Places nodes and starts them; later, finds new hosts for those that lost theirs."""

    def __init__(
        self,
        deployment: Deployment,
        hosts: Mapping[str, AgentHost],
        survey: _Survey,
        issue: Issue,
        reach_host: ReachHost,
    ) -> None:
        """Made by `deploy`."""
        self._deployment = deployment
        self._plan = deployment.plan
        self._hosts = hosts
        self._survey = survey
        self._executables = {each.name: each for each in self._plan.executables}
        self._ports: dict[str, int] = {}
        self._table: AddressTable | None = None
        self._issue = issue
        self._reach_host = reach_host
        self._tunnels = Tunnels(hosts)
        self._placement: Mapping[str, str] = {}
        self._logs: tuple[Path, NodeLogs | None, float] = (Path(), None, math.inf)

    @property
    def hosts(self) -> Sequence[AgentHost]:
        """All hosts."""
        return list(self._hosts.values())

    @property
    def placement(self) -> Mapping[str, str]:
        """Name of the first host of each node."""
        return self._placement

    def release(self) -> None:
        """Gives back what is neither a host's nor the program's."""
        self._tunnels.close()

    def start(self, undo: contextlib.ExitStack, make_fleet: MakeFleet | None) -> SupervisedProgram:
        """Starts the nodes, on hosts that have passed all else."""
        rooms = [_room(self._survey.machines[spec.name]) for spec in self._deployment.specs]
        plan, deployment = self._plan, self._deployment
        placement = place(plan.executables, rooms, deployment.choice, deployment.strategy)
        if placement.mistakes:
            raise LaunchError(f"program {plan.program!r}: {'; '.join(placement.mistakes)}")
        undo.callback(self._tunnels.close)
        self._check_ways(placement.hosts)
        by_host = {
            name: [each for each in plan.executables if placement.hosts[each.name] == name]
            for name in self._hosts
        }
        allotments = {
            name: allot(executables, self._survey.machines[name])
            for name, executables in by_host.items()
        }
        _refuse(
            [
                f"{name}: {mistake}"
                for name, allotment in allotments.items()
                for mistake in allotment.mistakes
            ]
        )
        self._reserve(by_host)
        secret = Secret.generate()
        tables = {
            name: AddressTable(
                self._endpoints(name, placement.hosts),
                secret,
                self._issue(name or "launcher", self._names(name)),
                _LISTEN_HOST,
            )
            for name in (LAUNCHER, *self._hosts)
        }
        self._table = tables[LAUNCHER]
        self._placement = placement.hosts
        folder = make_run_folder(plan.program, deployment.options.log_dir)
        limit = deployment.options.log_limit_bytes
        logs = NodeLogs(folder, list(self._executables), limit) if deployment.keeps_logs else None
        self._logs = folder, logs, limit
        plan = dataclasses.replace(plan, hosts=placement.hosts)
        program = SupervisedProgram(
            plan,
            deployment.options,
            self._table,
            folder,
            deployment.silence_s + _LATER_S,
            tells_logs=not deployment.options.quiet,
        )
        for name, host in self._hosts.items():
            part = dataclasses.replace(plan, executables=tuple(by_host[name]))
            for node, payload in payloads(part, tables[name], deployment.options).items():
                host.take(node, payload, allotments[name].grants[node])
            host.listen(program, *self._logs)
        program.supervise((make_fleet or _make_fleet)(self, program))
        return program

    def readmit(self, host: AgentHost, program: SupervisedProgram, limit_s: float) -> AgentHost:
        """Returns a host that was lost and has come back under its name and address.

        Its nodes are its own again, at the same ports, and may be started there.

        Args:
            host: As it was.
            program: Who hears of it.
            limit_s: Seconds within which it must have come back.

        Raises:
            LaunchError: It has not, or cannot take its nodes.
        """
        (spec,) = (each for each in self._deployment.specs if each.name == host.name)
        with contextlib.ExitStack() as undo:
            (again,) = _bring_up(self._deployment, [spec], self._reach_host, limit_s, undo).values()
            # Told to quit, its pod would have ended well, and no other would come in its place.
            undo.callback(again.hang_up)
            machine = _survey(self._deployment, {again.name: again}).machines[again.name]
            executables = [self._executables[node] for node in host.grants]
            allotment = allot(executables, machine)
            _refuse([f"{host.name}: {mistake}" for mistake in allotment.mistakes])
            addresses = [address for each in executables for address in each.addresses]
            again.reserve(addresses)
            for node in host.grants:
                again.take(node, host.payload(node), allotment.grants[node])
            again.listen(program, *self._logs)
            undo.pop_all()
        return again

    def _names(self, host: str) -> list[str]:
        """Returns all that a host may be called by, for its certificate."""
        return sorted(
            {view[host] for view in self._survey.views.addresses.values() if host in view}
        )

    def _check_ways(self, placement: Mapping[str, str]) -> None:
        needed = (
            (placement[caller.name], placement[callee])
            for caller in self._plan.executables
            for callee in caller.calls
        )
        if self._deployment.tunnel is not Tunnel.NEVER:
            return
        if missing := self._survey.views.missing(needed):
            ways = "; ".join(
                f"{caller} does not reach {host} "
                f"(tried {', '.join(self._survey.views.tried[host]) or 'nothing'})"
                for caller, host in missing
            )
            raise LaunchError(
                f"nodes call each other that are on hosts which do not reach each other: {ways}. "
                "Allow connections between these hosts, say how one is reached "
                "(hosts=['h1:address=10.0.0.1']), place those nodes together (placement=), or let calls go "
                "through the launcher (tunnel='auto')"
            )

    def _reserve(self, by_host: Mapping[str, Sequence[Executable]]) -> None:
        def reserve(name: str) -> Mapping[str, int]:
            addresses = [address for each in by_host[name] for address in each.addresses]
            try:
                return self._hosts[name].reserve(addresses)
            except LaunchError as error:
                raise HostError(f"{name}: {error}") from None

        for ports in _on_all(reserve, by_host):
            self._ports.update(ports)

    def _endpoints(self, caller: str, placement: Mapping[str, str]) -> dict[str, str]:
        """Returns `host:port` by address key, as a caller reaches them."""
        return {
            address.key: self._endpoint(caller, placement[each.name], address.key)
            for each in self._plan.executables
            for address in each.addresses
        }

    def _endpoint(self, caller: str, host: str, key: str) -> str:
        port, address = self._ports[key], self._survey.views.address(caller, host)
        tunnel = self._deployment.tunnel
        if caller != host and tunnel is not Tunnel.NEVER:
            if address is None or tunnel is Tunnel.ALWAYS:
                return self._tunnels.endpoint(caller, host, port)
        # A node that makes no calls there needs no way; the host's first address is as good as any.
        return endpoint(port, address or self._survey.views.address(host, host) or host)

    # Mover

    def move(self, node: str, fleet: Fleet) -> None:
        """Makes a node that has lost its host one of another, and tells all where it listens.

        Raises:
            LaunchError: No host has room for it, or the one that has cannot take it.
        """
        executable = self._executables[node]
        while True:
            living = {host.name: host for host in fleet.living()}
            host = living[self._new_host(executable, living)]
            try:
                grant = self._make_room(executable, host)
                break
            except LaunchError:
                if not host.is_lost:  # else the next one may have room, too
                    raise
        self._settle(executable, host, grant, fleet)

    def _make_room(self, executable: Executable, host: AgentHost) -> Grant:
        left = self._survey.machines[host.name].without(host.grants.values())
        allotment = allot([executable], left)
        if allotment.mistakes:
            raise LaunchError("; ".join(allotment.mistakes))
        self._ports.update(host.reserve(executable.addresses))
        return allotment.grants[executable.name]

    def _settle(self, executable: Executable, host: AgentHost, grant: Grant, fleet: Fleet) -> None:
        node, target = executable.name, host.name
        before = fleet.hosts[fleet.host_of(node)]
        payload = before.payload(node)
        fleet.place(node, target)
        assert self._table is not None
        table = AddressTable(
            self._endpoints(target, fleet.placement),
            self._table.secret,
            self._issue(target, self._names(target)),
            _LISTEN_HOST,
        )
        (moved,) = payloads(
            dataclasses.replace(self._plan, executables=(executable,)),
            table,
            self._deployment.options,
        ).values()
        host.take(node, dataclasses.replace(moved, setup=payload.setup), grant)
        before.give_up(node)
        keys = [address.key for address in executable.addresses]
        for each in fleet.living():
            try:
                each.tell_moved({key: self._endpoint(each.name, target, key) for key in keys})
            except LaunchError:
                if not each.is_lost:  # else no node there needs to know
                    raise
        moves = self._table.move({key: self._endpoint(LAUNCHER, target, key) for key in keys})
        self._table.clients.note_moved(moves)

    def _new_host(self, executable: Executable, living: Mapping[str, AgentHost]) -> str:
        names = [name for name in self._survey.machines if name in living]
        if not names:
            raise LaunchError("no host is left")
        if self._deployment.strategy is Strategy.SPREAD:
            # Of rooms that are alike the first is taken. It does not see who asked for nothing.
            names.sort(key=lambda name: len(living[name].grants))
        rooms = [
            _room(self._survey.machines[name].without(living[name].grants.values()))
            for name in names
        ]
        choice = self._choice_among(executable, living)
        placement = place([executable], rooms, choice, self._deployment.strategy)
        if placement.mistakes:
            raise LaunchError("; ".join(placement.mistakes))
        return placement.hosts[executable.name]

    def _choice_among(
        self, executable: Executable, living: Mapping[str, AgentHost]
    ) -> PlacementChoice:
        given: Any = self._deployment.choice or {}
        allowed = given.get(executable.name, given.get(executable.label))
        if allowed is None:
            return None
        names = [allowed] if isinstance(allowed, str) else list(allowed)
        left = [name for name in names if name in living]
        if not left:
            raise LaunchError(f"it may run on {', '.join(names)} only")
        return {executable.name: left}


def _make_fleet(starter: Starter, program: SupervisedProgram) -> Fleet:  # noqa: ARG001
    return Fleet(starter.hosts, starter.placement, starter, (starter.release,))


def _room(machine: Machine) -> Room:
    return Room(
        machine.name,
        cpu=float(len(machine.cores)),
        ram_gib=machine.ram_bytes / (1 << 30),
        gpu=float(len(machine.gpus)),
    )
