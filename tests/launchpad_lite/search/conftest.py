"""A PostgreSQL server for all tests that want one."""

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launchpad_lite.testing import poll_until


def _programs() -> Path | None:
    """Returns the folder of the newest server's programs. Debian has them on nobody's path."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    on_path = shutil.which("initdb")
    found += [Path(on_path).resolve().parent] if on_path else []
    return max(found, key=lambda path: float(path.parent.name), default=None)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A server of PostgreSQL on a unix socket, run by a user who is not root: the URL of a database."""
    bin_folder = _programs()
    assert bin_folder is not None
    user = "nobody" if os.getuid() == 0 else None
    # Not in the folder of this run of the tests, which is root's.
    folder = Path(tempfile.mkdtemp(prefix="lp-postgres-", dir="/tmp"))
    if user:
        shutil.chown(folder, user)
    try:
        data = folder / "data"
        subprocess.run(
            [bin_folder / "initdb", "-D", data, "-A", "trust", "-U", "tester", "--no-sync"],
            user=user,
            check=True,
            capture_output=True,
            cwd="/",
        )
        with subprocess.Popen(
            [bin_folder / "postgres", "-D", data, "-k", folder, "-h", ""],
            user=user,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as server:
            try:
                ready = [bin_folder / "pg_isready", "-q", "-h", folder]
                poll_until(lambda: subprocess.run(ready).returncode == 0, timeout_s=30)
                yield f"postgresql://tester@/postgres?host={folder}"
            finally:
                server.send_signal(2)  # SIGINT: end now, without waiting for those connected
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def url(server: str) -> str:
    """A database that is empty."""
    import psycopg

    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return server.replace("/postgres?", f"/{name}?")
