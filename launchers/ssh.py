"""Nodes on several hosts, over plain OpenSSH."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launchers._deployment import Deployment, Tunnel, deploy, read_requirements
from launchers._hosts import HostsChoice, HostSpec, mistakes_in_words, parse_hosts
from launchers._placement import Placement, PlacementChoice, Room, Strategy, place
from launchers._shipping import pack_up
from launchers.host import boot
from launchers.host.agent_link import check_standard_library
from launchers.host.arrival import Arrival, Hello, pythons, shell_command
from launchpad_lite.launching import (
    Executable,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)

__all__ = ["HostSpec", "SshLauncher"]

#: Signs of life that ssh itself exchanges within the time after which a host is lost.
_ALIVE_COUNT = 4


class SshLauncher(Launcher):
    """Runs nodes on hosts that `ssh` reaches, without admin rights there.

    The user's own `~/.ssh/config` says how: keys, jump hosts, names. A host needs Python, of the
    same minor version as here, and nothing else: our code and the user's is sent there, and kept
    there for the next time. All connections between nodes are under TLS, with certificates that
    are made for the run and exist in memory only.

    The output of each node goes to `<log_dir>/<label>/<replica>.log` here and, line by line with
    the node's name before it, to standard output.
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
        ssh: Sequence[str] = ("ssh",),
    ) -> None:
        """Prepares it; does not connect yet.

        Args:
            hosts: `"h1,h2:gpu=2,user@h3"`, a list of such, of mappings or of `HostSpec`s, or the
                path of a TOML file. See `docs/hosts.md`.
            placement: Which nodes may run where: a host, or several, by group (`"actor"`) or single
                node (`"actor[3]"`).
            strategy: `"spread"` the others over the hosts, or `"pack"` them onto few.
            tunnel: When calls between hosts go through the ssh connections, by way of this process:
                `"auto"`, where a host does not reach another; `"always"`; or `"never"`.
            python: Interpreter on the hosts, a path or a command. By default the path of this
                process's if there is one, then python3.N of the same version, then python3.
            requirements: File for `pip install --requirement`; an environment with that is made
                on each host, and kept there for the next time.
            silence_s: Seconds after which a host that says nothing is lost; it ends by itself what
                it runs of the program then. A link that is cut for less than half of it does no
                harm.
            connect_s: Seconds within which a host must answer.
            cache: Folder on the hosts for code and environments; by default
                `~/.cache/launchpad_lite`.
            ssh: The command, with options of the user's.

        Raises:
            ValueError: Hosts, placement or strategy are malformed; all mistakes are listed.
        """
        self._specs = parse_hosts(hosts) if hosts else ()
        self._choice = placement
        self._strategy = Strategy(strategy)
        self._tunnel = Tunnel(tunnel)
        self._python = python
        self._requirements = None if requirements is None else Path(requirements)
        if not silence_s >= 1:
            raise ValueError(f"silence_s is at least 1 s, not {silence_s}")
        self._silence_s = silence_s
        self._connect_s = connect_s
        self._cache = cache
        self._ssh = tuple(ssh)
        command = self._ssh[0] if self._ssh else ""
        if mistakes := [*mistakes_in_words(python=python, cache=cache, ssh=command)]:
            raise ValueError("; ".join(mistakes))
        self.description = f"{len(self._specs)} hosts over SSH"

    def _place(self, executables: Sequence[Executable]) -> Placement:
        rooms = [
            Room(spec.name, cpu=spec.cpu, ram_gib=spec.ram_gib, gpu=spec.gpu)
            for spec in self._specs
        ]
        return place(executables, rooms, self._choice, self._strategy)

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns which nodes fit on no host, as far as hosts are known."""
        if not self._specs:
            return ["no hosts are named: hosts=['h1', 'user@h2'], or --hosts=h1,user@h2"]
        return self._place(executables).mistakes

    def placement(self, executables: Sequence[Executable]) -> Mapping[str, str]:
        """Returns on which host each node runs.

        What hosts have is known when they are reached; then a node may be placed elsewhere, if it
        asks for something that its host does not have.
        """
        return self._place(executables).hosts

    def emit(self, plan: LaunchPlan, options: LaunchOptions) -> Mapping[str, bytes]:  # noqa: ARG002
        """Returns what is run to reach the hosts, what runs there first, and what code is sent.

        Raises:
            LaunchError: The code that nodes need cannot be read.
        """
        commands = [
            f"# {spec.name}: {', '.join(each for each in plan.hosts if plan.hosts[each] == spec.name)}"
            f"\n{shlex.join(self.command(spec))}\n"
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
                is taken. Tells all that is wrong on all hosts.
        """
        check_standard_library()
        deployment = Deployment(
            plan,
            options,
            self._specs,
            self._choice,
            self._strategy,
            pack_up(plan.executables),
            self._tunnel,
            self._silence_s,
            read_requirements(self._requirements),
            self._cache,
        )
        return deploy(deployment, self._reach, self._connect_s)

    def _reach(self, spec: HostSpec, hello: Hello) -> Arrival:
        return Arrival(spec.name, self.command(spec), hello)

    def command(self, spec: HostSpec) -> list[str]:
        """Returns the command that reaches a host. Pure."""
        options = {
            # A question would wait for an answer that never comes.
            "BatchMode": "yes",
            "ConnectTimeout": f"{max(1, round(self._connect_s / 2))}",
            "ServerAliveInterval": f"{max(1, round(self._silence_s / _ALIVE_COUNT))}",
            "ServerAliveCountMax": f"{_ALIVE_COUNT}",
        }
        return [
            *self._ssh,
            "-T",
            *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
            *(("-p", str(spec.port)) if spec.port is not None else ()),
            "--",
            spec.destination,
            shell_command(pythons(spec.python or self._python)),
        ]
