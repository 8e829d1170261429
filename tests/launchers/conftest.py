"""Hosts to launch on: built once, lent to one test at a time."""

from collections.abc import Iterator

import pytest

from tests.beds.slurm import SlurmCluster
from tests.beds.ssh_hosts import SshHosts, lend


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[SshHosts]:
    """The three hosts behind `hosts`; mark tests with `needs_ssh_hosts`."""
    with SshHosts() as hosts:
        yield hosts


@pytest.fixture
def hosts(ssh_hosts: SshHosts) -> Iterator[SshHosts]:
    """Three hosts as new; the test fails if it leaves a process on any of them."""
    yield from lend(ssh_hosts)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster behind `slurm`, on hosts of its own; mark tests with `needs_slurm`."""
    with SshHosts() as hosts, SlurmCluster(hosts) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """Three idle nodes; the test fails if it leaves a process or a job."""
    yield from lend(slurm_cluster)
