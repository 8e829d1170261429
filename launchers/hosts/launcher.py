"""A launcher for hosts that a command reaches."""

import abc
import dataclasses
import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launchers.host import boot
from launchers.hosts.arrival import Arrival, Hello, host_command, pythons
from launchers.hosts.deployment import Deployment, deploy, try_host
from launchers.hosts.host_list import HostsChoice, HostSpec, parse_hosts
from launchers.hosts.host_options import HostOptions, Tunnel, read_requirements
from launchers.hosts.placement import Placement, PlacementChoice, Strategy, place
from launchers.hosts.shipping import pack_up
from launchpad_lite.launching import (
    Executable,
    Finding,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)
from launchpad_lite.process.agent_process import check_standard_library


class HostsLauncher(Launcher):
    """Runs nodes on hosts that a command reaches, without admin rights there. To be subclassed.

    A host needs only Python, of the same minor version as here. The launcher sends our code and the user's
    code there, and the host keeps both for the next launch. All connections between nodes are under TLS,
    with certificates that are made for this run and exist only in memory.

    The output of each node goes to `<log_dir>/<label>/<replica>.log` here and, line by line with
    the node's name before it, to standard output.

    Example:
        class Lsf(HostsLauncher):
            description = "hosts of an LSF job"
            interface = 1

            def __init__(self):
                super().__init__(sorted(set(os.environ["LSB_HOSTS"].split())))

            def command(self, host, there):
                return ["blaunch", host.name, *there]
    """

    shows_output = True

    def __init__(
        self,
        hosts: HostsChoice = (),
        *,
        placement: PlacementChoice = None,
        strategy: str = "spread",
        tunnel: str = "auto",
        python: str | None = None,
        requirements: str | Path | None = None,
        silence_s: float = 8.0,
        connect_s: float = 20.0,
        cache: str | None = None,
    ) -> None:
        """Prepares it; does not connect yet.

        Args:
            hosts: `"h1,h2:gpu=2,user@h3"`, a list of such, of mappings or of `HostSpec`s, or the
                path of a TOML file. See `docs/hosts.md`.
            placement: Which nodes may run where: a host, or several, by group (`"actor"`) or single
                node (`"actor[3]"`).
            strategy: `"spread"` the others over the hosts, or `"pack"` them onto few.
            tunnel: When calls between hosts go through the links to them, by way of this process:
                `"auto"`, where a host does not reach another; `"always"`; or `"never"`.
            python: Interpreter on the hosts, a path or a command. By default the first that exists of: the
                path of this process's interpreter, python3.N of the same version, python3.
            requirements: File for `pip install --requirement`; an environment with that is made
                on each host, and kept there for the next time.
            silence_s: Seconds of silence after which a host counts as lost; the host then ends its part of
                the program itself. A link that is cut for less than half of this time does no harm.
            connect_s: Seconds within which a host must answer.
            cache: Folder on the hosts for code and environments; by default
                `~/.cache/launchpad_lite`.

        Raises:
            ValueError: Hosts, placement or strategy are malformed; all mistakes are listed.
        """
        self._specs = parse_hosts(hosts) if hosts else ()
        text = read_requirements(requirements)
        self._wanted = HostOptions(
            placement, Strategy(strategy), Tunnel(tunnel), python, text, cache, silence_s
        )
        self._connect_s = connect_s
        if mistakes := self._wanted.mistakes():
            raise ValueError("; ".join(mistakes))

    @abc.abstractmethod
    def command(self, host: HostSpec, there: Sequence[str]) -> Sequence[str]:
        """Returns the command that runs another one on a host.

        The command passes standard input, output and error on, unchanged. It ends when the program that it
        runs ends, and at SIGTERM. The launcher may call this method several times; a call has no effect.

        Args:
            host: Where.
            there: What to run there, as arguments; for a shell, `shlex.join` makes a line of them.
        """

    def _place(self, executables: Sequence[Executable]) -> Placement:
        return place(executables, self._specs, self._wanted.placement, self._wanted.strategy)

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns which nodes fit on no host, as far as hosts are known."""
        if not self._specs:
            return ["no hosts are named: hosts=['h1', 'user@h2'], or --hosts=h1,user@h2"]
        return self._place(executables).mistakes

    def placement(self, executables: Sequence[Executable]) -> Mapping[str, str]:
        """Returns on which host each node runs.

        The launcher learns what hosts have when it reaches them. It may then place a node elsewhere, if the
        host lacks something that the node asks for.
        """
        return self._place(executables).hosts

    def checks(self) -> Mapping[str, Callable[[], Finding]]:
        """Returns a check for each host, which reaches it as a launch does, up to its agent."""
        if not self._specs:
            return {}
        plan = LaunchPlan("doctor", self.name, self.description, ())
        whole = self._deployment(plan, LaunchOptions())

        def check(spec: HostSpec) -> Finding:
            return try_host(dataclasses.replace(whole, specs=(spec,)), self._connect_s)

        return {f"host {spec.name}": functools.partial(check, spec) for spec in self._specs}

    def emit(self, plan: LaunchPlan, options: LaunchOptions) -> Mapping[str, bytes]:  # noqa: ARG002
        """Returns the commands that reach the hosts, the first program there, and lists of the code that is sent.

        Raises:
            LaunchError: The code that nodes need cannot be read.
        """
        commands = [
            f"# {spec.name}: {', '.join(each for each in plan.hosts if plan.hosts[each] == spec.name)}"
            f"\n{shlex.join(self.command(spec, self._there(spec)))}\n"
            for spec in self._specs
        ]
        shipment = pack_up(plan.executables)
        files = [
            f"{tree.key}  {path}  {source}\n"
            for tree in shipment.trees
            for path, source in sorted(tree.files.items())
        ]
        packages = [f"{name}=={version}\n" for name, version in shipment.requires.items()]
        return {
            "commands.sh": "\n".join(commands).encode(),
            "boot.py": Path(boot.__file__).read_bytes(),
            "files.txt": "".join(files).encode(),
            "packages.txt": "".join(packages).encode(),
        }

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes; returns when their addresses are known and bound.

        Raises:
            LaunchError: A host cannot be reached or cannot run nodes, there is no room, or a port
                is taken. Lists the mistakes of all hosts.
        """
        check_standard_library()
        return deploy(self._deployment(plan, options), self._connect_s)

    def _deployment(self, plan: LaunchPlan, options: LaunchOptions) -> Deployment:
        shipment = pack_up(plan.executables)
        return Deployment(plan, options, self._specs, self._wanted, shipment, self._reach)

    def _reach(self, spec: HostSpec, hello: Hello) -> Arrival:
        return Arrival(spec.name, self.command(spec, self._there(spec)), hello)

    def _there(self, spec: HostSpec) -> Sequence[str]:
        return host_command(pythons(spec.python or self._wanted.python))
