"""Several SSH hosts on one machine: namespaces of the kernel, each with an sshd of its own.

A host is a network, process, mount and host-name namespace with its own home, /tmp, /dev/shm and
/run. The hosts and the launcher's side, h0, hang on a private switch that leads nowhere else, so
that every bed uses the same addresses and beds do not meet. Nothing has a name outside: networks
live by descriptors of this process, hosts by a pipe whose other end it holds. When this process
ends, even by SIGKILL, all of it goes.
"""

import contextlib
import ctypes
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from launchpad_lite.testing import poll_until
from tests.beds.bed import Bed

LAUNCHER = "h0"
"""The name of the launcher's side, which runs no sshd."""

_CHECKOUT = Path(__file__).resolve().parents[2]
_HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)  # what sshd and ssh go by, whatever $HOME says
_TMP = Path("/tmp")
_BRIDGE = "docker0"
_SERVICES = ("sshd", "slurmd")
_CLONE_NEWNET = 0x40000000


def find_program(name: str) -> str | None:
    """The absolute path of a program of the system, or None.

    A user's PATH need not hold the folders of daemons.
    """
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


@dataclass(eq=False)
class _Host:
    """One host; the launcher's side is one without a process."""

    name: str
    address: str
    folder: Path
    network: int
    """The descriptor that keeps the network namespace."""
    process: "subprocess.Popen[bytes] | None" = None
    init: int = 0
    """The host's first process, as a pid outside of it."""
    disturbed: set[str] = field(default_factory=set)
    """What a test did to it: cut, blocked, full."""

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    @property
    def shm(self) -> Path:
        """Memory, not part of the folder: there while the host is up."""
        return Path(f"/proc/{self.init}/root/dev/shm")

    @property
    def script(self) -> Path:
        return self.folder / "enter.sh"

    @property
    def log(self) -> Path:
        return self.folder / "sshd.log"


class SshHosts(Bed):
    """Hosts h1 to hN, reached by ssh from h0; a context manager. Needs root, sshd and iproute2.

    Hosts see this machine's files, with these exceptions, so that what a launcher forgets to ship is
    missing: /tmp, the home and /run are their own, and of this checkout there is only the virtual
    environment. The interpreter is at the same path as here. What must be the same everywhere (as on
    a network drive) goes to `shared`.

    Not thread-safe.

    Args:
        count: How many hosts, up to 200.
        extra_addresses: IPv4 addresses with prefix length, like "172.17.0.1/16". Each host has all of
            them, and they lead nowhere: the bridges of container engines. Whoever connects to one
            reaches itself.
        ipv6: Whether there is IPv6 alone, also on loopback.

    Attributes:
        names: h1 to hN.
        addresses: Of all hosts, by name, with h0.
        shared: A folder that is the same here and on all hosts.
    """

    def __init__(
        self, count: int = 3, *, extra_addresses: Sequence[str] = (), ipv6: bool = False
    ) -> None:
        self.names = [f"h{number}" for number in range(1, count + 1)]
        network = "fd00:77::" if ipv6 else "10.77.0."
        self.addresses = {
            name: f"{network}{10 + number}" for number, name in enumerate([LAUNCHER, *self.names])
        }
        self._is_ipv6 = ipv6
        self._extra_addresses = extra_addresses
        self._hosts: dict[str, _Host] = {}
        self._services: list[subprocess.Popen[Any]] = []
        super().__init__()

    @property
    def ssh_config(self) -> Path:
        """The launcher's ~/.ssh/config. Tests may add to it; `restore` takes that back."""
        return self._hosts[LAUNCHER].home / ".ssh" / "config"

    def run(self, command: Sequence[str], **popen_options: Any) -> "subprocess.Popen[Any]":
        """Starts a command on the launcher's side, where `ssh h1` works as for a user.

        It has h0's network, host name, /etc/hosts and home, and this machine's /tmp. The process
        that is returned is the command itself: its pid is seen here, and signals reach it.

        Args:
            command: The program and its arguments.
            popen_options: For `subprocess.Popen`.
        """
        host = self._hosts[LAUNCHER]
        enter = f'. {shlex.quote(str(host.script))}; cd "$PWD"; exec "$@"'
        namespaces = [*_in_network(host.network), "/usr/bin/unshare", "--mount", "--uts"]
        return subprocess.Popen(
            [*namespaces, "/bin/sh", "-c", enter, LAUNCHER, *command], **popen_options
        )

    def run_service(self, command: Sequence[str]) -> "subprocess.Popen[Any]":
        """Starts a daemon on the launcher's side; it ends with the bed, or when this is killed.

        Args:
            command: It must stay in the foreground.
        """
        new = ["/usr/bin/unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        keep = '"$@" </dev/null & read -r _'
        service = self.run(
            [*new, "/bin/bash", "-c", keep, "service", *command],
            stdin=self._life,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._services.append(service)
        self._cleanup.callback(end, service)
        return service

    def run_on(self, name: str, *command: str) -> str:
        """Runs a command on a host, without ssh, and returns its output.

        Raises:
            RuntimeError: It failed; its error output is in the message. Or the host is down.
        """
        if not self._hosts[name].init:
            raise RuntimeError(f"{name} is down; boot it first")
        target = str(self._hosts[name].init)
        enter = ["/usr/bin/nsenter", "-t", target, "--net", "--mount", "--uts", "--pid"]
        return _call([*enter, *command])

    def crash(self, name: str) -> None:
        """Kills everything on a host at once. Its kernel lives on: peers see connections reset."""
        host = self._hosts[name]
        if host.process is None:
            return
        if host.init:
            # Its end is the end of all others, and the end of the process waits for that.
            with contextlib.suppress(ProcessLookupError):
                os.kill(host.init, signal.SIGKILL)
        else:  # it did not boot
            host.process.kill()
        host.process.wait()
        host.process = None
        host.init = 0

    def boot(self, name: str) -> None:
        """Starts a host that crashed, with its home as it was and the rest empty."""
        host = self._hosts[name]
        self._start(host)
        self._await(host)

    def cut(self, name: str) -> None:
        """Unplugs a host's network; nobody is told."""
        self._plug(name, "down")
        self._hosts[name].disturbed.add("cut")

    def heal(self, name: str) -> None:
        """Undoes `cut`, `block` towards this host, and what `separate` did here."""
        host = self._hosts[name]
        if "cut" in host.disturbed:
            self._plug(name, "up")
        if "blocked" in host.disturbed:
            self._filter(host, "-F")
        host.disturbed -= {"cut", "blocked"}

    def block(self, source: str, target: str) -> None:
        """Has the target drop new TCP connections from the source, as a firewall would.

        Connections that exist live on, and those from the target to the source still work: block
        them, too, where neither may reach the other.
        """
        host = self._hosts[target]
        address = self.addresses[source]
        self._filter(host, "-A", "INPUT", "-s", address, "-p", "tcp", "--syn", "-j", "DROP")
        host.disturbed.add("blocked")

    def separate(self, one: str, other: str) -> None:
        """Drops all that two hosts send each other, also on connections that exist.

        All else works, such as the launcher's links to both. `heal` both afterwards.
        """
        for target, source in ((one, other), (other, one)):
            host = self._hosts[target]
            self._filter(host, "-A", "INPUT", "-s", self.addresses[source], "-j", "DROP")
            host.disturbed.add("blocked")

    def forget_key(self, name: str) -> None:
        """Has the launcher know another host key for this host, as after an attack."""
        self._write_known_hosts(wrong=name)

    def fill_disk(self, name: str) -> None:
        """Fills a host's home to the last block, until it boots again."""
        host = self._hosts[name]
        full = host.folder / "full"
        full.mkdir(exist_ok=True)
        lines = [
            "set -e",
            _command("mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "full", full),
            _command("cp", "-a", _HOME / ".ssh", full),
        ]
        for kept in _kept([_HOME]):
            place = full / kept.relative_to(_HOME)
            lines += [_command("mkdir", "-p", place), _command("mount", "--bind", kept, place)]
        lines += [
            _command("mount", "--rbind", full, _HOME),
            _command("head", "-c", "2m", "/dev/zero") + f" >{_HOME}/ballast 2>&1 || true",
        ]
        self.run_on(name, "/bin/sh", "-c", "\n".join(lines))
        host.disturbed.add("full")

    def processes(self, name: str) -> list[psutil.Process]:
        """All processes on a host but its own daemons; on h0, all that `run` started and is left."""
        here = _namespace(os.getpid(), "pid")  # services of h0 have one of their own

        def counts(process: psutil.Process) -> bool:
            if name == LAUNCHER:
                return _namespace(process.pid, "pid") == here
            return not process.name().startswith(_SERVICES)

        return self._select(name, counts)

    def daemons(self, name: str) -> list[psutil.Process]:
        """The processes of a host that `processes` leaves out."""
        return self._select(name, lambda process: process.name().startswith(_SERVICES))

    def leftovers(self) -> list[str]:
        """What runs on any host, h0 among them, as "h2: 4711 sleep 60"; sshd does not count."""
        lines = []
        for name in self.addresses:
            for process in self.processes(name):
                with contextlib.suppress(psutil.Error):
                    lines.append(f"{name}: {process.pid} {shlex.join(process.cmdline())}")
        return lines

    def files(self, name: str) -> list[str]:
        """The files in a host's /tmp, ~/.cache and, while it is up, /dev/shm; sorted."""
        host = self._hosts[name]
        places = {"/tmp": host.tmp, "~/.cache": host.home / ".cache"}
        if host.process is not None:
            places["/dev/shm"] = host.shm
        return sorted(
            f"{shown}/{Path(folder, file).relative_to(place)}"
            for shown, place in places.items()
            for folder, _, files in os.walk(place)  # passes over what goes meanwhile
            for file in files
        )

    def restore(self) -> None:
        """Makes all as it was at the start: hosts up and reachable, nothing runs, homes empty."""
        for process in self.processes(LAUNCHER):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _empty_home(self._hosts[LAUNCHER])
        _empty(self.shared)
        self._write_known_hosts()
        self._write_ssh_config()
        booting = []
        for name in self.names:
            host = self._hosts[name]
            self.heal(name)
            if host.disturbed or self.processes(name):
                self.crash(name)
            _empty_home(host)
            if host.process is None:
                booting.append(host)
                self._start(host)
            else:
                _empty(host.tmp)
                _empty(host.shm)
        for host in booting:
            self._await(host)

    def _select(self, name: str, counts: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        host = self._hosts[name]
        network = os.fstat(host.network).st_ino
        ours = {host.init, *(started.pid for started in [host.process, *self._services] if started)}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it ends while we look
                if process.pid not in ours and _namespace(process.pid, "net") == network:
                    if counts(process):
                        found.append(process)
        return found

    def _build(self, stack: contextlib.ExitStack) -> None:
        # Not below /tmp, where hosts could not see it.
        folder = Path(tempfile.mkdtemp(prefix="launchpad-bed-", dir="/var/tmp"))
        self._life, held = os.pipe()
        stack.callback(os.close, self._life)
        janitor = subprocess.Popen(
            ["/bin/bash", "-c", _JANITOR, "janitor", str(folder)],
            stdin=self._life,
            start_new_session=True,
        )
        stack.callback(janitor.wait)
        stack.callback(os.close, held)

        self.shared = folder / "shared"
        self.shared.mkdir()
        hosts = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        loopback = "::1" if self._is_ipv6 else "127.0.0.1"
        (folder / "hosts").write_text(f"{loopback} localhost\n{hosts}")
        for name, address in self.addresses.items():
            network = _new_network()
            stack.callback(os.close, network)
            host = _Host(name, address, folder / name, network)
            self._hosts[name] = host
            for part in (host.home, host.tmp, host.folder / "nothing"):
                part.mkdir(parents=True)
            host.tmp.chmod(0o1777)
            host.home.chmod(0o700)
            (host.home / ".ssh").mkdir(mode=0o700)
        self._wire(stack)
        self._make_keys()
        self._write_known_hosts()
        self._write_ssh_config()
        self._write_entry(self._hosts[LAUNCHER], {_HOME: self._hosts[LAUNCHER].home})
        for name in self.names:
            host = self._hosts[name]
            hidden = {_CHECKOUT: host.folder / "nothing", _HOME: host.home, _TMP: host.tmp}
            self._write_entry(host, hidden)
            stack.callback(self.crash, name)
            self._start(host)
        for name in self.names:
            self._await(self._hosts[name])

    def _wire(self, stack: contextlib.ExitStack) -> None:
        self._switch = _new_network()
        stack.callback(os.close, self._switch)
        lines = ["link add br0 type bridge", "link set br0 up"]
        for name, host in self._hosts.items():
            peer = f"peer name eth0 netns {_path(host.network)}"
            # No addresses but ours: IPv6 would find ways around a block.
            lines += [
                f"link add {name} type veth {peer}",
                f"link set {name} addrgenmode none",
                f"link set {name} master br0 up",
            ]
        self._ip(self._switch, lines)
        for host in self._hosts.values():
            lines = [
                "link set lo up",
                "link set eth0 addrgenmode none",
                f"address add {host.address}/{'64 nodad' if self._is_ipv6 else '24'} dev eth0",
                "link set eth0 up",
            ]
            if self._is_ipv6:
                lines.append("address del 127.0.0.1/8 dev lo")
            if self._extra_addresses:
                lines += [f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up"]
                lines += [f"address add {one} dev {_BRIDGE}" for one in self._extra_addresses]
            self._ip(host.network, lines)

    def _make_keys(self) -> None:
        keys = {name: host.folder / "host_key" for name, host in self._hosts.items()}
        keys[LAUNCHER] = self._hosts[LAUNCHER].home / ".ssh" / "id_ed25519"
        makers = [
            subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key])
            for key in keys.values()
        ]
        failed = [maker.args for maker in makers if maker.wait()]
        if failed:
            raise RuntimeError(f"ssh-keygen failed: {failed}")
        self._keys = {name: key.with_suffix(".pub").read_text() for name, key in keys.items()}
        for name in self.names:
            host = self._hosts[name]
            accepted = host.home / ".ssh" / "authorized_keys"
            accepted.write_text(self._keys[LAUNCHER])
            (host.folder / "sshd_config").write_text(
                _SSHD_CONFIG.format(address=host.address, key=keys[name])
            )

    def _write_known_hosts(self, wrong: str = "") -> None:
        # Any other key serves as the wrong one: the user's own.
        keys = {name: self._keys[LAUNCHER if name == wrong else name] for name in self.names}
        lines = [f"{name},{self.addresses[name]} {key}" for name, key in keys.items()]
        (self.ssh_config.parent / "known_hosts").write_text("".join(lines))

    def _write_ssh_config(self) -> None:
        # ssh would ask about keys it does not know, and wait for an answer.
        self.ssh_config.write_text("Host *\n    User root\n    StrictHostKeyChecking yes\n")

    def _write_entry(self, host: _Host, hidden: dict[Path, Path]) -> None:
        """Writes the shell commands that make new namespaces those of the host.

        Args:
            host: Whose.
            hidden: Folders of this machine, and what the host sees in their place.
        """
        bed = host.folder.parent
        is_launcher = host.name == LAUNCHER
        identity = host.folder / "boot_id"
        shutil.copyfile("/proc/sys/kernel/random/uuid", identity)
        lines = [
            "set -e",
            f"echo {host.name} >/proc/sys/kernel/hostname",
            _command("mount", "--bind", bed / "hosts", "/etc/hosts"),
        ]
        if not is_launcher:  # a new one with each boot
            lines.append(f"cat /proc/sys/kernel/random/uuid >{shlex.quote(str(identity))}")
        lines.append(_command("mount", "--bind", identity, "/proc/sys/kernel/random/boot_id"))
        kept = _kept(hidden, also=[_CHECKOUT] if is_launcher else [])
        held = {folder: host.folder / f"kept_{index}" for index, folder in enumerate(kept)}
        for folder, place in held.items():
            place.mkdir()
            lines.append(_command("mount", "--bind", folder, place))
        for folder, instead in hidden.items():
            lines.append(_command("mount", "--bind", instead, folder))
        for folder, place in held.items():
            lines += [_command("mkdir", "-p", folder), _command("mount", "--bind", place, folder)]
            if not is_launcher:  # a host does not change what all of them use
                lines.append(_command("mount", "-o", "remount,bind,ro", folder))
        lines.append(f"export HOME={shlex.quote(str(_HOME))}")
        host.script.write_text("\n".join(lines) + "\n")

    def _start(self, host: _Host) -> None:
        if host.process is not None:
            raise RuntimeError(f"{host.name} is up; crash it first")
        _empty(host.tmp)
        host.disturbed.discard("full")
        host.log.unlink(missing_ok=True)
        script = _BOOT.format(
            enter=shlex.quote(str(host.script)),
            sshd=find_program("sshd"),
            config=shlex.quote(str(host.folder / "sshd_config")),
        )
        new = ["/usr/bin/unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
        with host.log.open("wb") as log:
            host.process = subprocess.Popen(
                [*_in_network(host.network), *new, "--kill-child", "/bin/bash", "-c", script],
                stdin=self._life,
                stdout=log,
                stderr=log,
                env={"PATH": f"{os.defpath}:/usr/sbin:/sbin"},
                cwd="/",
                start_new_session=True,
            )

    def _await(self, host: _Host) -> None:
        process = host.process
        assert process is not None

        def listens() -> bool:
            return b"Server listening" in host.log.read_bytes() or process.poll() is not None

        poll_until(listens, must=False)
        if b"Server listening" not in host.log.read_bytes():
            raise RuntimeError(f"{host.name} did not boot:\n{host.log.read_text()}")
        (child,) = psutil.Process(process.pid).children()
        host.init = child.pid

    def _plug(self, name: str, state: str) -> None:
        self._ip(self._switch, [f"link set {name} {state}"])

    def _filter(self, host: _Host, *rule: str) -> None:
        program = find_program("iptables") or "iptables"
        _call([*_in_network(host.network), program, "--wait", *rule])

    def _ip(self, network: int, lines: Iterable[str]) -> None:
        program = find_program("ip") or "ip"
        _call([*_in_network(network), program, "-batch", "-"], "\n".join(lines))


# The pipe that bash reads from never brings anything; its end is the bed's.
_JANITOR = 'read -r _; for _ in {1..100}; do rm -rf -- "$1" && break; sleep 0.1; done 2>/dev/null'

_BOOT = """. {enter}
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 shm /dev/shm
mkdir /run/sshd
cd /
{sshd} -D -e -f {config} </dev/null &
read -r _ || exit 0
"""

# Tests dial often, and many at the same time: sshd drops none of them, and spares each the 0.2 s of
# processor time that its default key exchange takes.
_SSHD_CONFIG = """ListenAddress {address}
HostKey {key}
PidFile none
AuthenticationMethods publickey
PermitRootLogin prohibit-password
UsePAM no
KexAlgorithms curve25519-sha256
MaxStartups 1000
MaxSessions 1000
Subsystem sftp internal-sftp
"""


def _kept(hidden: Iterable[Path], also: Sequence[Path] = ()) -> list[Path]:
    """The folders of our interpreter that hidden ones would take away; none within another."""
    base = Path(sys.base_prefix).parent  # links to it by another version's name stand beside it
    if base in (_HOME, *_HOME.parents):
        base = Path(sys.base_prefix)
    hidden = list(hidden)
    wanted = [
        folder
        for folder in dict.fromkeys([*also, base, Path(sys.prefix)])
        if any(place in folder.parents for place in hidden)
    ]
    return [folder for folder in wanted if not any(one in folder.parents for one in wanted)]


def _empty_home(host: _Host) -> None:
    _empty(host.home, ".ssh")
    _empty(host.home / ".ssh", "authorized_keys", "id_ed25519", "id_ed25519.pub")


def _empty(folder: Path, *spared: str) -> None:
    """Empties a host's folder of all but some files and the places where others are mounted."""
    # Where one namespace removes a folder, another loses what it has mounted there.
    mounted = {
        kept.relative_to(place).parts[0]
        for place in (_HOME, _TMP)
        for kept in _kept([place], also=[_CHECKOUT])
    }
    for path in folder.iterdir():
        if path.name in mounted or path.name in spared:
            continue
        if path.is_dir() and not path.is_symlink():
            remove(path)
        else:
            path.unlink()


def remove(folder: Path) -> None:
    """Removes a folder to which processes that were killed a moment ago may still write."""

    def is_gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    poll_until(is_gone)


def _new_network() -> int:
    """A descriptor of a new network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    found: list[int] = []
    errors: list[int] = []

    def make() -> None:  # a namespace is a thread's, so that this process stays in its own
        if libc.unshare(_CLONE_NEWNET) == 0:
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        else:
            errors.append(ctypes.get_errno())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if errors:
        raise OSError(errors[0], f"no new network namespace: {os.strerror(errors[0])}")
    return found[0]


def _path(network: int) -> str:
    return f"/proc/{os.getpid()}/fd/{network}"


def _in_network(network: int) -> list[str]:
    # Not `ip netns exec`, which hides /sys/fs/cgroup.
    return ["/usr/bin/nsenter", f"--net={_path(network)}"]


def _namespace(pid: int, kind: str) -> int:
    return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino


def _command(*words: str | Path) -> str:
    return shlex.join(map(str, words))


def _call(command: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr}")
    return done.stdout


def end(process: "subprocess.Popen[Any]") -> None:
    """Kills a process and waits for its end."""
    process.kill()
    process.wait()


class Bed(Protocol):
    """What can be lent to tests."""

    def leftovers(self) -> list[str]: ...
    def restore(self) -> None: ...


B = TypeVar("B", bound=Bed)


def lend(bed: B, within_s: float = 30.0) -> Iterator[B]:
    """The body of a fixture: one test has the bed, and must leave nothing running.

    Args:
        bed: It is as at the start, and is made so again.
        within_s: Seconds that what the test started has to end, also on hosts that are cut off.
    """
    yield bed
    poll_until(lambda: not bed.leftovers(), within_s, must=False)
    leftovers = bed.leftovers()
    bed.restore()
    assert not leftovers, "the test left behind:\n" + "\n".join(leftovers)
