"""Other Pythons of this machine, for tests of what happens when a host has one of them."""

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def find_python(version: str) -> str | None:
    """The path of an interpreter, like "3.10" or "2.7"; None where there is none."""
    for path in _candidates(version):
        ask = "import sys; sys.stdout.write('%d.%d' % sys.version_info[:2])"
        # The shims of version managers are there for versions that are not.
        asked = subprocess.run([path, "-E", "-c", ask], capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout == version:
            return str(path)
    return None


def find_other_minor_version() -> str | None:
    """The path of an interpreter that our code could run in, but is not of this version."""
    found = (find_python(f"3.{minor}") for minor in range(10, 20) if minor != sys.version_info[1])
    return next(filter(None, found), None)


def _candidates(version: str) -> Iterator[str | Path]:
    # Beside ours, where version managers put them all.
    yield from sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}"))
    if found := shutil.which(f"python{version}"):
        yield found
