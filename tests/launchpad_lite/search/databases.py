"""A PostgreSQL server of the tests' own, which ends with them."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launchpad_lite.testing import poll_until


def programs() -> Path | None:
    """Returns the folder of the newest server's programs. Debian has them on nobody's path."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    on_path = shutil.which("initdb")
    found += [Path(on_path).resolve().parent] if on_path else []
    return max(found, key=lambda path: float(path.parent.name), default=None)


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Runs a server on a unix socket, as a user who is not root; yields the URL of a database."""
    bin_folder = programs()
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
