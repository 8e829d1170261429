"""The peers, and the virtual environments they live in, below `.cache/benchmarks/`."""

import argparse
import concurrent.futures
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ENVIRONMENTS = ROOT / ".cache" / "benchmarks"
_INSTALL_TIMEOUT_S = 1800.0


class AbsentError(Exception):
    """A peer cannot be installed here."""


@dataclass(frozen=True)
class Peer:
    """One column of the tables."""

    name: str
    title: str
    requirements: tuple[str, ...] = ()
    #: The distribution whose version is shown; None shows that of Python.
    distribution: str | None = None
    #: None means that of the driver.
    python: str | None = None
    #: Whether its extension modules look for libpython without knowing where it is.
    needs_libraries: bool = False
    #: Whether it is measured over TLS, too.
    tls: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """What its processes run."""
        return ROOT / "benchmarks" / "peers" / f"{self.name}_peer.py"


US = "courier"
FLOOR = "floor"
PEERS = (
    Peer(US, "courier", ("--editable", str(ROOT), "numpy"), "launchpad-lite", tls=True),
    Peer(FLOOR, "raw socket", ("numpy",), tls=True),
    Peer("grpcio", "grpcio", ("grpcio", "numpy"), "grpcio", tls=True),
    Peer(
        "ray",
        "Ray",
        ("ray", "numpy"),
        "ray",
        environment={"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"},
    ),
    Peer("pyro5", "Pyro5", ("Pyro5", "numpy"), "Pyro5"),
    Peer("rpyc", "rpyc", ("rpyc", "numpy"), "rpyc"),
    Peer("managers", "managers", ("numpy",)),
    Peer(
        "cpp_courier",
        "C++ Courier",
        # 0.5.2 hangs for ever on arrays.
        ("dm-launchpad==0.5.1", "tensorflow==2.8.4", "protobuf<3.20", "numpy<1.24"),
        "dm-launchpad",
        python="3.10",
        needs_libraries=True,
    ),
)


@dataclass(frozen=True)
class Installed:
    """A peer that can be run."""

    peer: Peer
    interpreter: Path
    variables: dict[str, str]

    def version(self) -> str:
        """Returns what is measured, and the Python it runs on."""
        python = f"Python {self._print('platform.python_version()')}"
        if self.peer.distribution is None:
            return python
        version = self._print(f"importlib.metadata.version({self.peer.distribution!r})")
        return f"{self.peer.distribution} {version}, {python}"

    def _print(self, expression: str) -> str:
        code = f"import importlib.metadata, platform; print({expression})"
        command = [self.interpreter, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def install(peer: Peer) -> Installed:
    """Makes the environment of a peer if it is not there or not as wanted.

    Raises:
        AbsentError: It cannot be made here.
    """
    python = _find_python(peer.python)
    folder = _ENVIRONMENTS / peer.name
    interpreter = folder / "bin" / "python"
    stamp = folder / ".requirements"
    wanted = _wanted(peer, python)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {peer.title}", flush=True)
        _run([python, "-m", "venv", "--clear", str(folder)])
        if peer.requirements:
            _run([str(interpreter), "-m", "pip", "install", "--quiet", *peer.requirements])
        stamp.write_text(wanted)
    return Installed(peer, interpreter, _variables(peer, python))


def install_all(peers: Sequence[Peer]) -> tuple[list[Installed], dict[str, str]]:
    """Returns the peers that can be run; and by name, why the others cannot."""
    installed, absent = [], {}
    # Mostly they wait for the network.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        attempts = [pool.submit(install, peer) for peer in peers]
    for peer, attempt in zip(peers, attempts, strict=True):
        try:
            installed.append(attempt.result())
        except AbsentError as error:
            absent[peer.name] = str(error)
            print(f"{peer.title} is absent: {error}", flush=True)
    return installed, absent


def options(
    description: str | None, peers: Sequence[Peer], workers: int
) -> argparse.ArgumentParser:
    """Returns a parser of what all benchmarks of peers that take turns are told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--peers", nargs="+", default=[peer.name for peer in peers])
    parser.add_argument("--write", action="store_true", help="puts the table into docs/")
    return parser


def _wanted(peer: Peer, python: str) -> str:
    """Describes an environment, so that a change of it can be seen."""
    lines = [python, *peer.requirements]
    if str(ROOT) in peer.requirements:
        lines.append((ROOT / "pyproject.toml").read_text())
    return "\n".join(lines)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_INSTALL_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        errors = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise AbsentError(errors[-1] if errors else error.stderr.strip()[-200:]) from error
    except subprocess.TimeoutExpired as error:
        raise AbsentError("its installation hangs") from error


def _find_python(version: str | None) -> str:
    """Returns the command of a Python, in no virtual environment if it is the driver's own."""
    if version is None:
        return str(Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}")
    command = [ROOT / ".ci" / "find-python", version]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise AbsentError(f"no Python {version} on this machine")
    return found.stdout.strip()


def _variables(peer: Peer, python: str) -> dict[str, str]:
    # Nothing of the driver's own environment may reach the imports of a peer.
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }
    # numpy's linear algebra, which no peer uses, starts threads that spin for 0.1 s: what is measured
    # meanwhile would have one core less.
    variables["OPENBLAS_NUM_THREADS"] = "1"
    variables.update(peer.environment)
    if peer.needs_libraries:
        code = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        variables["LD_LIBRARY_PATH"] = found.stdout.strip()
    return variables


def machine() -> str:
    """Returns what the figures were measured on."""
    model = platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        models = [line for line in cpu_info.read_text().splitlines() if "model name" in line]
        if models:
            model = models[0].partition(":")[2].strip()
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    system = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} cores ({model}), {memory_gib:.0f} GiB of memory, {system}"


def revision() -> str:
    """Returns the commit that is measured."""
    command = ["git", "describe", "--always", "--dirty"]
    described = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"
