"""Engines to launch on, built once for each process, lent to one test at a time; marked processes."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.kubernetes.cluster import KubernetesCluster
from tests.beds.slurm import SlurmCluster
from tests.beds.ssh_hosts import SshHosts
from tests.launchers.host_engines import KubernetesDesk, SlurmDesk, SshDesk, desk_on
from tests.launchers.marks import Marked, mark_all
from tests.launchers.pods import write_trust


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """All that a test starts; ends what is left after the test."""
    yield from mark_all(monkeypatch)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package that pip can install without any index."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    record = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / "tiny-1.5-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "VALUE = 42\n")
        archive.writestr("tiny-1.5.dist-info/METADATA", record)
        archive.writestr("tiny-1.5.dist-info/WHEEL", wheel)
        archive.writestr("tiny-1.5.dist-info/RECORD", "")
    return path


@pytest.fixture(scope="session")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is mounted into each pod of a run."""
    return write_trust(tmp_path_factory.mktemp("trust"))


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[SshHosts]:
    """The three hosts behind `ssh`; mark tests with `needs_ssh_hosts`."""
    with SshHosts() as hosts:
        yield hosts


@pytest.fixture
def ssh(ssh_hosts: SshHosts, tmp_path: Path) -> Iterator[SshDesk]:
    """Three hosts as new; the test fails if it leaves a process on any of them."""
    with desk_on(ssh_hosts, lambda: SshDesk(ssh_hosts, tmp_path)) as desk:
        yield desk


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster behind `slurm`, on hosts of its own; mark tests with `needs_slurm`."""
    with SshHosts() as hosts, SlurmCluster(hosts) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmDesk]:
    """Three idle nodes; the test fails if it leaves a process or a job."""
    with desk_on(slurm_cluster, lambda: SlurmDesk(slurm_cluster)) as desk:
        yield desk


@pytest.fixture(scope="session")
def kubernetes_cluster() -> Iterator[KubernetesCluster]:
    """The cluster behind `kubernetes`; mark tests with `needs_kubernetes`."""
    with KubernetesCluster() as cluster:
        yield cluster


@pytest.fixture
def kubernetes(kubernetes_cluster: KubernetesCluster, tmp_path: Path) -> Iterator[KubernetesDesk]:
    """An empty cluster without faults; the test fails if it leaves anything there."""
    with desk_on(kubernetes_cluster, lambda: KubernetesDesk(kubernetes_cluster, tmp_path)) as desk:
        yield desk
