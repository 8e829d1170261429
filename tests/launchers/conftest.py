"""Engines to launch on: built once for each process, lent to one test at a time."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.kubernetes.cluster import KubernetesCluster
from tests.beds.slurm import SlurmCluster
from tests.beds.ssh_hosts import SshHosts, lend
from tests.launchers.host_engines import KubernetesDesk, SlurmDesk, SshDesk


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[SshHosts]:
    """The three hosts behind `ssh`; mark tests with `needs_ssh_hosts`."""
    with SshHosts() as hosts:
        yield hosts


@pytest.fixture
def ssh(ssh_hosts: SshHosts, tmp_path: Path) -> Iterator[SshDesk]:
    """Three hosts as new; the test fails if it leaves a process on any of them."""
    with contextlib.contextmanager(lend)(ssh_hosts):
        desk = SshDesk(ssh_hosts, tmp_path)
        try:
            yield desk
        finally:
            desk.leave()


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster behind `slurm`, on hosts of its own; mark tests with `needs_slurm`."""
    with SshHosts() as hosts, SlurmCluster(hosts) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmDesk]:
    """Three idle nodes; the test fails if it leaves a process or a job."""
    with contextlib.contextmanager(lend)(slurm_cluster):
        desk = SlurmDesk(slurm_cluster)
        try:
            yield desk
        finally:
            desk.leave()


@pytest.fixture(scope="session")
def kubernetes_cluster() -> Iterator[KubernetesCluster]:
    """The cluster behind `kubernetes`; mark tests with `needs_kubernetes`."""
    with KubernetesCluster(gpus=4) as cluster:
        yield cluster


@pytest.fixture
def kubernetes(kubernetes_cluster: KubernetesCluster, tmp_path: Path) -> Iterator[KubernetesDesk]:
    """An empty cluster without faults; the test fails if it leaves anything there."""
    with contextlib.contextmanager(lend)(kubernetes_cluster):
        desk = KubernetesDesk(kubernetes_cluster, tmp_path)
        try:
            yield desk
        finally:
            desk.leave()
