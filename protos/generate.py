#!/usr/bin/env python3
"""Writes the message classes of each `.proto` below `protos/` into the package that uses them.

The generated code is checked in: users need no protoc, and reviewers see what a change does.
The generator is pinned to an old one, because protobuf promises to load code that is older than
itself only; what this one writes loads with the oldest that we support, too. It lives in an
environment of its own (`.venv-protos`), away from the newer protobuf that the tests use.

Only messages are generated: courier registers generic gRPC handlers and needs no stubs.

    python protos/generate.py          # write what TARGETS names
    python protos/generate.py --check  # exit 1 and show a diff when it is not up to date

Needs only the standard library; runs on any supported Python.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
#: Where the code of each source goes. Sources lie below PROTOS; so they are called in the descriptor
#: pool, too.
TARGETS = {
    Path("courier/v1/courier.proto"): ROOT / "courier" / "_proto",
    Path("search/v1/search.proto"): ROOT / "launchpad_lite" / "search" / "_proto",
}
SUFFIXES = ("_pb2.py", "_pb2.pyi")

ENVIRONMENT = ROOT / ".venv-protos"
# grpc_tools imports pkg_resources, which setuptools 81 and newer no longer have.
REQUIREMENTS = ("grpcio-tools==1.62.3", "setuptools<81")
# grpcio-tools 1.62.3 has wheels for these; building it from source takes a C++ compiler.
GENERATOR_PYTHONS = ("3.11", "3.12", "3.10", "3.9")

EXIT_DIFFERENT = 1
EXIT_NO_GENERATOR = 3


class NoGeneratorError(RuntimeError):
    """This machine cannot run the pinned generator: no suitable Python."""


def main() -> int:
    """Generates or checks, as asked on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"write nothing; exit {EXIT_DIFFERENT} with a diff when the code is not up to date, "
        f"{EXIT_NO_GENERATOR} when no Python here can run the generator",
    )
    check = parser.parse_args().check
    try:
        generator = _generator_python()
    except NoGeneratorError as error:
        print(error, file=sys.stderr)
        return EXIT_NO_GENERATOR
    with tempfile.TemporaryDirectory() as scratch:
        fresh = _generate(generator, Path(scratch))
    return _check(fresh) if check else _write(fresh)


def _generate(generator: Path, scratch: Path) -> dict[Path, str]:
    """Runs protoc; returns the text of each output file by its path."""
    protoc = [str(generator), "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}"]
    sources = map(str, TARGETS)
    subprocess.run(
        [*protoc, f"--python_out={scratch}", f"--pyi_out={scratch}", *sources], check=True
    )
    # protoc mirrors the proto's folders. The code imports no other generated module, so it can
    # move from courier/v1/ to courier/_proto/; its name in the descriptor pool stays.
    return {
        target / f"{source.stem}{suffix}": (
            scratch / source.parent / f"{source.stem}{suffix}"
        ).read_text(encoding="utf-8")
        for source, target in TARGETS.items()
        for suffix in SUFFIXES
    }


def _write(fresh: dict[Path, str]) -> int:
    for path, text in fresh.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def _check(fresh: dict[Path, str]) -> int:
    stale = False
    for path, text in fresh.items():
        checked_in = path.read_text(encoding="utf-8") if path.exists() else ""
        if checked_in == text:
            continue
        stale = True
        sys.stdout.writelines(
            difflib.unified_diff(
                checked_in.splitlines(keepends=True),
                text.splitlines(keepends=True),
                fromfile=f"{path.relative_to(ROOT)} (checked in)",
                tofile=f"{path.relative_to(ROOT)} (from protos/)",
            )
        )
    if stale:
        print("The generated code is not up to date. Run: make protos", file=sys.stderr)
        return EXIT_DIFFERENT
    return 0


def _generator_python() -> Path:
    """Returns the Python that has the pinned generator, after installing it when needed."""
    python = ENVIRONMENT / "bin" / "python"
    ready = ENVIRONMENT / "ready.txt"  # Holds what was installed; written last.
    wanted = "\n".join(REQUIREMENTS)
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    subprocess.run([_base_python(), "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-qq", *REQUIREMENTS], check=True)
    ready.write_text(wanted, encoding="utf-8")
    return python


def _base_python() -> str:
    """Returns a Python command that the generator has wheels for.

    Raises:
        NoGeneratorError: There is none on this machine.
    """
    for command in _base_python_candidates():
        # pyenv's shims are on PATH for versions they then refuse to run.
        if subprocess.run([command, "-c", ""], capture_output=True, check=False).returncode == 0:
            return command
    raise NoGeneratorError(
        f"{REQUIREMENTS[0]} runs on Python {', '.join(GENERATOR_PYTHONS)}; none of them was found "
        "on PATH or in pyenv. Install one and run again."
    )


def _base_python_candidates() -> Iterator[str]:
    if f"{sys.version_info.major}.{sys.version_info.minor}" in GENERATOR_PYTHONS:
        yield sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in GENERATOR_PYTHONS:
        if command := shutil.which(f"python{version}"):
            yield command
        yield from map(str, pyenv.glob(f"{version}.*/bin/python{version}"))


if __name__ == "__main__":
    sys.exit(main())
