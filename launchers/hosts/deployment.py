"""From hosts that have been reached to a running program: what SSH and Slurm have in common.

The steps, in this order: the facts of each host, the code that it lacks, its agent, its resources, the
addresses by which hosts reach each other, the placement of nodes, ports, certificates, the nodes. No node
starts before all hosts have passed all steps. One error lists the mistakes of all hosts.
"""

import contextlib
import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from courier import Secret, TlsCredentials
from courier.lowlevel import join_address
from launchers.host.grant import Grant
from launchers.host.link import LinkFrame
from launchers.host.machine import Machine
from launchers.host.probe import WORD_BYTES, Target, reach
from launchers.host.worker import payloads
from launchers.hosts._tunnels import Tunnels
from launchers.hosts.arrival import Arrival, Facts, Hello
from launchers.hosts.fleet import Fleet
from launchers.hosts.host_list import HostSpec
from launchers.hosts.host_options import HostOptions, Tunnel
from launchers.hosts.placement import Strategy, hosts_chosen, place
from launchers.hosts.reachability import LAUNCHER, Views, choose_addresses
from launchers.hosts.shipping import Shipment
from launchers.hosts.trust import Authority
from launchers.supervision.allotment import allot
from launchers.supervision.console import Console, Output
from launchers.supervision.logs import NodeLogs
from launchers.supervision.remote import AgentHost, close_all
from launchers.supervision.run_folder import make_run_folder
from launchers.supervision.supervised_program import SupervisedProgram
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    Executable,
    Finding,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)
from launchpad_lite.worker.address import OpenTable

T = TypeVar("T")
R = TypeVar("R")

#: Servers listen on all interfaces, because a probe decides which one peers call. Each peer must have a
#: certificate of the program, and prove that it knows the secret.
_LISTEN_HOST = "::"
#: Seconds after which a host counts as out of reach. TCP sends a lost first packet again after one second.
_REACH_S = 3.2
#: Seconds from the time at which the loss of a host is noticed until all processes know of it.
_LATER_S = 1.0
#: How many hosts are contacted at the same time, each by a thread that mostly waits.
_MOST_AT_ONCE = 1024
#: What to do about a Python of another version.
_OTHER_PYTHON = "Name another interpreter, as in hosts=['h1:python=/path/to/python{0}'], or python= for all hosts"
_OTHER_IMAGE = "Use an image that has Python {0}, or launch with the Python of the image"
#: Seconds that the agent has to start once its code is there.
_AGENT_S = 60.0


MakeFleet = Callable[["Starter", SupervisedProgram], Fleet]
ReachHost = Callable[[HostSpec, Hello], Arrival]
#: Makes credentials of this name, for servers with these host names.
Issue = Callable[[str, Sequence[str]], TlsCredentials]


@dataclass(frozen=True)
class Deployment:
    """What to start on the hosts, and how."""

    plan: LaunchPlan
    options: LaunchOptions
    specs: tuple[HostSpec, ...]
    wanted: HostOptions
    shipment: Shipment
    reach_host: ReachHost  # starts a bare interpreter on a host
    ways: Views | None = None  # None: the hosts find out how they reach each other
    issue: Issue | None = None  # None: the run gets an authority of its own
    output: Output | None = None  # None: this process shows it, unless the options say `quiet`
    in_pods: bool = False  # each host is the pod of one node, which keeps no files


def deploy(
    deployment: Deployment, limit_s: float, make_fleet: MakeFleet | None = None
) -> RunningProgram:
    """Starts a program on several hosts; returns when its addresses are known and bound.

    `make_fleet` combines the hosts once their nodes are placed. LaunchError: the program cannot be
    started; no part of it is left.
    """
    # First, because it raises if the package `cryptography` is missing.
    issue = deployment.issue or Authority(deployment.plan.program).issue
    if deployment.output is None and not deployment.options.quiet:
        deployment = dataclasses.replace(deployment, output=Console())
    with contextlib.ExitStack() as undo:
        hosts = _bring_up(deployment, deployment.specs, limit_s, undo)
        survey = _survey(deployment, hosts)
        program = Starter(deployment, hosts, survey, issue).start(undo, make_fleet)
        undo.pop_all()
    return program


def try_host(deployment: Deployment, limit_s: float) -> Finding:
    """Reaches the one host of a deployment as `deploy` does, then ends its agent."""
    (name,) = (each.name for each in deployment.specs)
    with contextlib.ExitStack() as undo:
        hosts = _bring_up(deployment, deployment.specs, limit_s, undo)
        survey = _survey(deployment, hosts)
    address = survey.views.address(LAUNCHER, name)
    if address is None:
        text = "its agent answered; no address is reached from here"
        return Finding("warn", text, "Calls go through tunnels")
    return Finding("ok", f"its agent answered; it is reached at {address}")


def _bring_up(
    deployment: Deployment, specs: Iterable[HostSpec], limit_s: float, undo: contextlib.ExitStack
) -> dict[str, AgentHost]:
    shipment, wanted = deployment.shipment, deployment.wanted
    hello = Hello(
        tuple(tree.key for tree in shipment.trees),
        tuple(shipment.requires),
        wanted.silence_s,
        wanted.requirements,
        wanted.cache,
        deployment.in_pods,
    )
    arrivals = []
    for spec in specs:
        arrivals.append(deployment.reach_host(spec, hello))
        undo.callback(arrivals[-1].close)
    hosts: dict[str, AgentHost] = {}
    undo.callback(lambda: close_all([*hosts.values()]))
    _ship(deployment, arrivals, time.monotonic() + limit_s, hosts)
    return {arrival.name: hosts[arrival.name] for arrival in arrivals}


def _on_all(do: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Calls a function for all hosts at once; raises one error with all mistakes."""
    todo = list(items)
    results: list[R] = []
    mistakes = []
    pool = ThreadPoolExecutor(max(1, min(_MOST_AT_ONCE, len(todo))))
    try:
        for future in [pool.submit(do, item) for item in todo]:
            try:
                results.append(future.result())
            except LaunchError as error:
                mistakes.append(str(error))
    except BaseException:  # an interrupt: the caller ends the hosts that the threads wait for
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    _refuse(mistakes)
    return results


def _refuse(mistakes: Sequence[str]) -> None:
    if mistakes:
        raise LaunchError("\n".join(dict.fromkeys(mistakes)))


def _ship(
    deployment: Deployment,
    arrivals: Sequence[Arrival],
    give_up_at: float,
    hosts: dict[str, AgentHost],
) -> None:
    """Sends each host the code that it lacks; adds it to `hosts` as soon as its agent runs."""
    here, requires, in_pods = Facts.here(), deployment.shipment.requires, deployment.in_pods
    packing = threading.Lock()
    archives: dict[str, bytes] = {}

    def ship(arrival: Arrival) -> None:
        there = arrival.facts(give_up_at)
        mistakes = mismatches(here, there, requires, in_pods=in_pods)
        _refuse([f"{arrival.name}: {mistake}" for mistake in mistakes])
        with packing:
            for tree in deployment.shipment.trees:
                if tree.key in there.missing and tree.key not in archives:
                    archives[tree.key] = tree.archive()
        arrival.ship({key: archives[key] for key in there.missing})
        arrival.await_agent(time.monotonic() + _AGENT_S)
        # It sends the agent signs of life, while other hosts take longer.
        hosts[arrival.name] = AgentHost(arrival.name, arrival.link(), deployment.output)

    _on_all(ship, arrivals)


def mismatches(
    here: Facts, there: Facts, requires: Mapping[str, str], *, in_pods: bool = False
) -> Iterator[str]:
    """Yields why code of this process cannot run at a host, as far as an image may not choose."""
    minor = here.python[:2]
    if (there.implementation, there.python[:2]) != (here.implementation, minor):
        remedy = (_OTHER_IMAGE if in_pods else _OTHER_PYTHON).format(_dotted(minor))
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


@dataclass
class _Survey:
    machines: dict[str, Machine]
    views: Views


def _survey(deployment: Deployment, hosts: Mapping[str, AgentHost]) -> _Survey:
    """Asks hosts what they have, and how they reach each other unless that is known."""
    specs = {spec.name: spec for spec in deployment.specs}

    def ask(host: AgentHost) -> tuple[Machine, Target]:
        spec, word = specs[host.name], secrets.token_hex(WORD_BYTES)
        answer = host.ask_agent(LinkFrame("survey", {"word": word}))
        machine = Machine.decode(answer["machine"], host.name)
        machine = machine.limited(cpu=spec.cpu, ram_gib=spec.ram_gib, gpu=spec.gpu)
        addresses = [spec.address] if spec.address else answer["addresses"]
        return machine, Target(host.name, addresses, answer["port"], word)

    found = dict(zip(hosts, _on_all(ask, hosts.values()), strict=True))
    machines = {name: machine for name, (machine, _) in found.items()}
    targets = {name: target for name, (_, target) in found.items()}
    if deployment.ways is not None:
        return _Survey(machines, deployment.ways)
    # An agent sends nothing while it probes, so a probe must end before the agent counts as lost.
    timeout_s = max(1.0, min(_REACH_S, deployment.wanted.silence_s / 2))
    return _Survey(machines, _probe(targets, hosts, timeout_s))


def _probe(
    targets: Mapping[str, Target], hosts: Mapping[str, AgentHost], timeout_s: float
) -> Views:
    def probe(host: AgentHost | None) -> Mapping[str, Sequence[str]]:
        if host is None:
            return reach(list(targets.values()), None, timeout_s)
        others = [dataclasses.asdict(each) for each in targets.values() if each.name != host.name]
        question = LinkFrame("probe", {"targets": others, "timeout_s": timeout_s})
        reached: Mapping[str, Sequence[str]] = host.ask_agent(question)["reached"]
        return reached

    reached = _on_all(probe, [None, *hosts.values()])
    return choose_addresses(
        {name: target.addresses for name, target in targets.items()},
        dict(zip([LAUNCHER, *hosts], reached, strict=True)),
    )


class Starter:
    """Places nodes and starts them; later, finds new hosts for nodes whose hosts are lost."""

    def __init__(
        self, deployment: Deployment, hosts: Mapping[str, AgentHost], survey: _Survey, issue: Issue
    ) -> None:
        self._deployment = deployment
        self._plan = deployment.plan
        self.hosts = list(hosts.values())
        self._survey = survey
        self._executables = {each.name: each for each in self._plan.executables}
        self._ports: dict[str, int] = {}
        self._table: AddressTable | None = None
        self._secret = Secret.generate()
        self._issue = issue
        self._tunnels = Tunnels(hosts)
        self.placement: Mapping[str, str] = {}
        self._logs: tuple[Path, NodeLogs | None, float] = (Path(), None, math.inf)

    def start(self, undo: contextlib.ExitStack, make_fleet: MakeFleet | None) -> SupervisedProgram:
        """Starts the nodes, on hosts that have passed the survey."""
        rooms = [_room(self._survey.machines[spec.name]) for spec in self._deployment.specs]
        plan, deployment, wanted = self._plan, self._deployment, self._deployment.wanted
        placement = place(plan.executables, rooms, wanted.placement, wanted.strategy)
        if placement.mistakes:
            raise LaunchError(f"program {plan.program!r}: {'; '.join(placement.mistakes)}")
        undo.callback(self._tunnels.close)
        self.placement = placement.hosts
        self._check_ways()
        by_host = {
            host: [each for each in plan.executables if placement.hosts[each.name] == host.name]
            for host in self.hosts
        }
        machines = self._survey.machines
        grants = _on_all(lambda host: _grants(by_host[host], machines[host.name]), by_host)

        def reserve(host: AgentHost) -> Mapping[str, int]:
            return host.reserve([a for each in by_host[host] for a in each.addresses])

        for ports in _on_all(reserve, self.hosts):
            self._ports.update(ports)
        self._table = self._table_for(LAUNCHER, placement.hosts)
        options = deployment.options
        folder, limit = make_run_folder(plan.program, options.log_dir), options.log_limit_bytes
        logs = None if deployment.in_pods else NodeLogs(folder, list(self._executables), limit)
        self._logs = folder, logs, limit
        plan = dataclasses.replace(plan, hosts=placement.hosts)
        unaware_s = wanted.silence_s + _LATER_S
        program = SupervisedProgram(plan, options, self._table, folder, unaware_s, tells_logs=True)
        for (host, executables), granted in zip(by_host.items(), grants, strict=True):
            part = dataclasses.replace(plan, executables=tuple(executables))
            table = self._table_for(host.name, placement.hosts)
            host.payloads.update(payloads(part, table, options))
            host.grants.update(granted)
            host.listen(program, *self._logs)
        fleet = make_fleet(self, program) if make_fleet else Fleet(self)
        program.supervise(fleet)
        return program

    def readmit(self, host: AgentHost, program: SupervisedProgram, limit_s: float) -> AgentHost:
        """Returns a host that was lost and came back, with its nodes at the same ports."""
        (spec,) = (each for each in self._deployment.specs if each.name == host.name)
        with contextlib.ExitStack() as undo:
            (again,) = _bring_up(self._deployment, [spec], limit_s, undo).values()
            # An agent that is told to quit ends its pod with success, and no other pod would replace it.
            undo.callback(again.hang_up)
            machine = _survey(self._deployment, {again.name: again}).machines[again.name]
            executables = [self._executables[node] for node in host.grants]
            again.payloads.update(host.payloads)
            again.grants.update(_grants(executables, machine))
            again.reserve([address for each in executables for address in each.addresses])
            again.listen(program, *self._logs)
            undo.pop_all()
        return again

    def _table_for(self, host: str, placement: Mapping[str, str]) -> AddressTable:
        """Returns the endpoints of nodes as a host reaches them, and the credentials to call them."""
        ways = self._survey.views.addresses.values()
        names = sorted({view[host] for view in ways if host in view})
        tls = self._issue(host or "launcher", names)
        endpoints = {
            address.key: self._endpoint(host, placement[each.name], address.key)
            for each in self._plan.executables
            for address in each.addresses
        }
        return AddressTable(endpoints, self._secret, tls, _LISTEN_HOST)

    def _check_ways(self) -> None:
        if self._deployment.wanted.tunnel is not Tunnel.NEVER:
            return
        needed = (
            (self.placement[caller.name], self.placement[callee])
            for caller in self._plan.executables
            for callee in caller.calls
        )
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

    def _endpoint(self, caller: str, host: str, key: str) -> str:
        """Returns `host:port` of an address, as a caller reaches it."""
        port, address = self._ports[key], self._survey.views.address(caller, host)
        tunnel = self._deployment.wanted.tunnel
        if caller != host and tunnel is not Tunnel.NEVER:
            if address is None or tunnel is Tunnel.ALWAYS:
                return self._tunnels.endpoint(caller, host, port)
        # Without a way there, no node of the caller calls this host, so any address will do.
        return join_address(address or self._survey.views.address(host, host) or host, port)

    def close(self) -> None:
        self._tunnels.close()

    def move(self, node: str, fleet: Fleet) -> None:
        executable = self._executables[node]
        refused: dict[str, str] = {}
        while True:
            living = {host.name: host for host in fleet.living() if host.name not in refused}
            try:
                host = living[self._new_host(executable, living)]
            except LaunchError as error:
                raise LaunchError("; ".join([*refused.values(), str(error)])) from None
            try:
                grant = _grants([executable], self._left(host))[node]
                self._ports.update(host.reserve(executable.addresses))
                break
            except LaunchError as error:  # another host may have room
                refused[host.name] = str(error)
        self._settle(executable, host, grant, fleet)

    def _left(self, host: AgentHost) -> Machine:
        return self._survey.machines[host.name].without(host.grants.values())

    def _settle(self, executable: Executable, host: AgentHost, grant: Grant, fleet: Fleet) -> None:
        node, target = executable.name, host.name
        before = fleet.hosts[fleet.host_of(node)]
        keys = [address.key for address in executable.addresses]
        endpoints = {}  # first: if a host cannot reach the target, the move fails before anything has changed
        for each in fleet.living():
            try:
                endpoints[each] = {key: self._endpoint(each.name, target, key) for key in keys}
            except LaunchError:
                if not each.is_lost:  # a lost host has no nodes that must know
                    raise
        fleet.placement[node] = target
        table = self._table_for(target, fleet.placement)
        host.payloads[node] = before.payloads.pop(node)._replace(addresses=OpenTable.of(table))
        host.grants[node] = grant
        del before.grants[node]
        for each, moves in endpoints.items():
            each.tell_moved(moves)
        assert self._table is not None
        moves = self._table.move({key: self._endpoint(LAUNCHER, target, key) for key in keys})
        self._table.clients.note_moved(moves)

    def _new_host(self, executable: Executable, living: Mapping[str, AgentHost]) -> str:
        allowed = hosts_chosen(self._deployment.wanted.placement, executable)
        hosts = [host for host in living.values() if allowed is None or host.name in allowed]
        if not hosts and allowed is not None:
            raise LaunchError(f"it may run on {', '.join(allowed)} only")
        if not hosts:
            raise LaunchError("no host is left")
        strategy = self._deployment.wanted.strategy
        if strategy is Strategy.SPREAD:
            # `place` takes the first of equal rooms, which do not count nodes without requests.
            hosts.sort(key=lambda host: len(host.grants))
        placement = place([executable], [_room(self._left(host)) for host in hosts], None, strategy)
        if placement.mistakes:
            raise LaunchError("; ".join(placement.mistakes))
        return placement.hosts[executable.name]


def _grants(executables: Sequence[Executable], machine: Machine) -> Mapping[str, Grant]:
    """Returns what each executable gets of a machine; LaunchError if that has too little."""
    allotment = allot(executables, machine)
    _refuse([f"{machine.name}: {mistake}" for mistake in allotment.mistakes])
    return allotment.grants


def _room(machine: Machine) -> HostSpec:
    # Grants are rounded to bytes, so they may take one more than there is.
    ram_gib = max(0, machine.ram_bytes) / (1 << 30)
    return HostSpec(machine.name, cpu=len(machine.cores), ram_gib=ram_gib, gpu=len(machine.gpus))
