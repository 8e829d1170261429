import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launchpad_lite.testing import poll_until
from tests.beds.slurm import SlurmCluster
from tests.beds.ssh_hosts import SshHosts, lend
from tests.engines import needs_slurm, needs_ssh_hosts

_CHECKOUT = Path(__file__).resolve().parents[2]
_BRIDGE_ADDRESS = "172.17.0.1"

pytestmark = [needs_ssh_hosts, pytest.mark.slow]


@pytest.fixture(scope="module")
def bed() -> Iterator[SshHosts]:
    with SshHosts(extra_addresses=[f"{_BRIDGE_ADDRESS}/16"]) as hosts:
        yield hosts


@pytest.fixture
def hosts(bed: SshHosts) -> Iterator[SshHosts]:
    yield from lend(bed)


@pytest.fixture(scope="module")
def cluster(bed: SshHosts) -> Iterator[SlurmCluster]:
    with SlurmCluster(bed) as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    yield from lend(cluster)


def ssh(
    hosts: SshHosts, *arguments: str, connect_s: int = 30
) -> "subprocess.CompletedProcess[str]":
    command = ["ssh", "-o", f"ConnectTimeout={connect_s}", *arguments]
    pipe = subprocess.PIPE
    with hosts.run(command, stdout=pipe, stderr=pipe, text=True) as client:
        output, errors = client.communicate(timeout=60)
    return subprocess.CompletedProcess(command, client.returncode, output, errors)


def asleep(hosts: SshHosts, name: str) -> "subprocess.Popen[bytes]":
    """An ssh client whose command sleeps on a host."""
    client = hosts.run(["ssh", name, "sleep 600"], stderr=subprocess.DEVNULL)
    # Others may come and go meanwhile.
    poll_until(
        lambda: any(
            line.startswith(f"{name}: ") and line.endswith(" sleep 600")
            for line in hosts.leftovers()
        )
    )
    return client


def reaches(hosts: SshHosts, source: str, target: str, within_s: float = 20.0) -> bool:
    dial = f"exec 3<>/dev/tcp/{target}/22"
    return ssh(hosts, source, f"timeout {within_s} bash -c '{dial}'").returncode == 0


def test_hosts_are_machines_of_their_own_with_nothing_but_the_interpreter(hosts: SshHosts) -> None:
    commands = (
        "hostname; cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/pid; hostname -I"
    )
    seen = [ssh(hosts, name, commands).stdout.split() for name in hosts.names]
    assert [one[0] for one in seen] == ["h1", "h2", "h3"]
    assert not {*seen[0]} & {*seen[1]} - {_BRIDGE_ADDRESS}
    with hosts.run(["cat", "/proc/sys/kernel/random/boot_id"], stdout=subprocess.PIPE) as cat:
        assert cat.communicate()[0].decode().strip() not in (seen[0][1], seen[1][1])
    listed = ssh(hosts, "h1", f"ls {_CHECKOUT} /tmp ~; {sys.executable} -c 'import grpc'")
    assert listed.returncode == 0, listed.stderr
    assert "pyproject.toml" not in listed.stdout
    assert "pytest" not in listed.stdout


def test_what_runs_ignores_no_signal(hosts: SshHosts) -> None:
    """Though these tests may run in the background, under nohup."""
    show = "grep SigIgn /proc/self/status"
    ignored = [ssh(hosts, "h1", show).stdout.split()[1]]
    with hosts.run(["sh", "-c", show], stdout=subprocess.PIPE, text=True) as shell:
        ignored.append(shell.communicate()[0].split()[1])
    asked = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    assert not [each for each in asked if any(int(one, 16) >> each - 1 & 1 for one in ignored)]


def test_a_block_is_between_two_hosts_one_way(hosts: SshHosts) -> None:
    hosts.block("h1", "h2")
    assert not reaches(hosts, "h1", "h2", within_s=1.0)
    assert reaches(hosts, "h2", "h1")
    assert reaches(hosts, "h3", "h2")
    hosts.heal("h2")
    assert reaches(hosts, "h1", "h2")


def test_separated_hosts_reach_all_but_each_other(hosts: SshHosts) -> None:
    hosts.separate("h1", "h2")
    assert not reaches(hosts, "h1", "h2", within_s=1.0)
    assert not reaches(hosts, "h2", "h1", within_s=1.0)
    assert reaches(hosts, "h1", "h3")
    for name in ("h1", "h2"):
        hosts.heal(name)
    assert reaches(hosts, "h1", "h2")


def test_leftovers_are_told_and_ended_and_files_removed(bed: SshHosts) -> None:
    ssh(bed, "h1", "mkdir -p ~/.cache/a; touch ~/.cache/a/b /tmp/c /dev/shm/d")
    assert bed.files("h1") == ["/dev/shm/d", "/tmp/c", "~/.cache/a/b"]
    with asleep(bed, "h3") as client:
        client.kill()
    try:
        (left,) = bed.leftovers()
        assert left.startswith("h3: ")
        assert left.endswith("sleep 600")
        lent = lend(bed, within_s=0.1)
        next(lent)
        with pytest.raises(AssertionError, match=r"h3: .* sleep 600"):
            next(lent)
        assert bed.leftovers() == []
        assert bed.files("h1") == []
    finally:
        bed.restore()


def test_beds_do_not_meet_and_leave_nothing(hosts: SshHosts) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with SshHosts(1) as other:
        ssh(other, "h1", "touch ~/other")
        assert "other" not in ssh(hosts, "h1", "ls ~").stdout
        folder = other.shared.parent
        daemons = other.daemons("h1")
        assert daemons
    assert not folder.exists()
    assert not any(daemon.is_running() for daemon in daemons)
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


def test_a_killed_test_run_leaves_nothing() -> None:
    source = (
        f"import sys; sys.path.insert(0, {str(_CHECKOUT)!r})\n"
        "from tests.beds.ssh_hosts import SshHosts\n"
        "with SshHosts(1) as hosts:\n"
        "    hosts.run_service(['sleep', '600'])\n"
        "    print(hosts.shared.parent, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe) as run:
        assert run.stdout is not None
        folder = Path(run.stdout.readline().decode().strip())
        begun = psutil.Process(run.pid).children(recursive=True)
        assert folder.is_dir()
        run.kill()
    poll_until(lambda: not folder.exists())
    poll_until(lambda: not any(process.is_running() for process in begun))


@needs_slurm
def test_jobs_are_leftovers_and_ended(cluster: SlurmCluster) -> None:
    script = ["sbatch", "--wrap", "sleep 600", "-o", f"{cluster.hosts.shared}/%j"]
    with cluster.run(script, stdout=subprocess.DEVNULL) as sbatch:
        assert sbatch.wait() == 0
    poll_until(lambda: any("RUNNING wrap" in left for left in cluster.leftovers()))
    cluster.restore()
    assert cluster.leftovers() == []


@needs_slurm
def test_slurm_ends_with_all_its_daemons(hosts: SshHosts) -> None:
    with SshHosts(1) as other:
        with SlurmCluster(other) as cluster:
            names = {daemon.name() for daemon in other.daemons("h1")}
            assert "slurmd" in names
            folder = Path(cluster.environment["SLURM_CONF"]).parent
        assert not folder.exists()
        assert {daemon.name() for daemon in other.daemons("h1")} == {"sshd"}
        assert other.leftovers() == []
