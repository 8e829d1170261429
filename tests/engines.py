"""What tests need that not every machine has."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.beds.ssh_hosts import find_program

_ON_CI = os.environ.get("CI") == "true"  # where what is missing is a failure


def _root_has(*programs: str) -> bool:
    return os.geteuid() == 0 and all(map(find_program, programs))


needs_root = pytest.mark.skipif(not _ON_CI and os.geteuid() != 0, reason="needs root")

needs_reverb = pytest.mark.skipif(
    importlib.util.find_spec("reverb") is None and os.environ.get("REVERB") != "required",
    reason="dm-reverb is not installed (make reverb); there is none for Python 3.12 and newer",
)

needs_acme = pytest.mark.skipif(
    importlib.util.find_spec("acme") is None and os.environ.get("ACME") != "required",
    reason="Acme is not installed (make acme)",
)

needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None and os.environ.get("BACKENDS") != "required",
    reason="Dask is not installed (make backends)",
)

needs_spark = pytest.mark.skipif(
    not (importlib.util.find_spec("pyspark") and find_program("java"))
    and os.environ.get("BACKENDS") != "required",
    reason="PySpark and Java are not installed (make backends)",
)

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None and os.environ.get("BACKENDS") != "required",
    reason="PyTorch is not installed (make backends)",
)

needs_jax = pytest.mark.skipif(
    not (importlib.util.find_spec("jax") and importlib.util.find_spec("optax"))
    and os.environ.get("BACKENDS") != "required",
    reason="JAX and optax are not installed (make backends)",
)

needs_ssh_hosts = pytest.mark.skipif(
    not _ON_CI and not _root_has("sshd", "ip", "iptables"),
    reason="needs root, sshd, iproute2 and iptables",
)

needs_slurm = pytest.mark.skipif(
    not _ON_CI and not _root_has("sshd", "ip", "slurmctld", "slurmd", "srun", "munged"),
    reason="needs root, sshd, iproute2, Slurm and munge",
)

needs_kubernetes = pytest.mark.skipif(
    not _ON_CI and not _root_has("podman", "runc", "ip", "iptables"),
    reason="needs root, podman, runc, iproute2 and iptables",
)

needs_chromium = pytest.mark.skipif(
    not _ON_CI and not find_program("chromium"), reason="needs Chromium"
)

needs_postgres = pytest.mark.skipif(
    not _ON_CI
    and not (
        importlib.util.find_spec("psycopg")
        and (find_program("initdb") or list(Path("/usr/lib/postgresql").glob("*/bin/initdb")))
    ),
    reason="needs psycopg and PostgreSQL",
)
