"""`python -m launchpad_lite.launch doctor`: checks this machine, and hosts, and says what would fail."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from courier.lowlevel import bound, loopback, require_running_clock
from launchpad_lite._version import __version__
from launchpad_lite.launching import Finding, Launcher, get_launcher, installed_launchers
from launchpad_lite.parts.devices import visible_devices
from launchpad_lite.parts.escapes import shown
from launchpad_lite.parts.log_file import LOG_DIR_VARIABLE, make_folder_of_runs
from launchpad_lite.parts.private_files import check_folder

#: Seconds that all checks have together; they run side by side.
_LIMIT_S = 30.0
#: Seconds that a connection on loopback and `nvidia-smi` have.
_ANSWER_S = 20.0
#: Open files, and threads: what a program of two nodes needs at least, and many programs.
_FEWEST, _ENOUGH = 32, 1024
_MIB = 1 << 20
Check = Callable[[], Finding]


def diagnose(launcher: Launcher | None, *, as_json: bool) -> int:
    """Prints what checks find; returns the exit code: 1 if one fails, as of a named launcher."""
    own = _checks_of_all() if launcher is None else launcher.checks()
    findings: list[dict[str, str]] = []
    for name, found in run_checks({**machine_checks(), **own}, _LIMIT_S):
        changed = {"fail": "warn"} if launcher is None else {"none": "fail"}
        verdict = changed.get(found.verdict, found.verdict) if name in own else found.verdict
        finding = found._replace(verdict=verdict)
        findings.append({"check": name, **finding._asdict()})
        line = f"{finding.verdict:<4}  {name}: {'. '.join(filter(None, finding[1:]))}"
        if not as_json:
            print(shown(" | ".join(line.splitlines())), flush=True)  # noqa: T201
    fails = any(each["verdict"] == "fail" for each in findings)
    if as_json:
        whole = {"format": 1, "version": __version__, "ok": not fails, "findings": findings}
        print(json.dumps(whole, indent=2))  # noqa: T201
    return int(fails)


def _checks_of_all() -> Mapping[str, Check]:
    """Returns the checks of all launchers; those of one name are the same."""
    checks: dict[str, Check] = {}
    for name in installed_launchers():
        try:
            checks.update(get_launcher(name).checks())
        except Exception as error:  # noqa: BLE001 - code of others, some of which needs options
            remedy = f"Name it, with its options: --launcher={name} doctor"
            checks[name] = Finding("none", repr(error), remedy)._replace
    return checks


def run_checks(checks: Mapping[str, Check], limit_s: float) -> Iterator[tuple[str, Finding]]:
    """Runs all checks at once; yields what each has found, in their order, within a limit for all."""
    give_up_at = time.monotonic() + limit_s
    found: dict[str, Finding] = {}

    def run(name: str) -> None:
        try:
            found[name] = checks[name]()
        except Exception as error:  # noqa: BLE001 - it is told, and the others go on
            found[name] = Finding("fail", str(error) or repr(error))

    # Daemons: one that hangs must not keep the process.
    threads = {name: threading.Thread(target=run, args=(name,), daemon=True) for name in checks}
    for name, thread in threads.items():
        try:
            thread.start()
        except RuntimeError as error:
            found[name] = Finding("fail", str(error), "Raise `ulimit -u`, or pids of the container")
    for name, thread in threads.items():
        if thread.ident is not None:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        yield name, found.get(name, Finding("fail", f"no answer within {limit_s:g} s"))


# Checks of this machine: what programs of any launcher need


def machine_checks() -> Mapping[str, Check]:
    return {
        "python": _check_python,
        "loopback": _check_loopback,
        "shared memory": _check_shared_memory,
        "open files": lambda: _check_limit(resource.RLIMIT_NOFILE, "ulimit -n"),
        "processes": lambda: _check_limit(resource.RLIMIT_NPROC, "ulimit -u"),
        "gpu": _check_gpus,
        "clock": _check_clock,
        "temporary files": lambda: _check_folder(lambda: Path(tempfile.gettempdir()), "TMPDIR"),
        "folder of runs": lambda: _check_folder(make_folder_of_runs, LOG_DIR_VARIABLE),
    }


def graded(text: str, amount: float, remedy: str, *, enough: float, fewest: float = 0) -> Finding:
    """Returns a `fail` below what each program needs, and a `warn` below what some need."""
    if amount >= enough:
        return Finding("ok", text)
    return Finding("fail" if amount < fewest else "warn", text, remedy)


def _check_python() -> Finding:
    versions: dict[str, str | None] = {}
    for each in importlib.metadata.requires("launchpad-lite") or ():
        if "extra ==" not in each:
            name = re.split(r"[^\w.-]", each)[0]
            versions[name] = None
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version or 'is missing'}" for name, version in versions.items())
    text = f"{platform.python_version()}, {sys.executable}, with {found}"
    return graded(text, -len(missing), f"pip install {' '.join(missing)}", enough=0, fewest=0)


def _check_loopback() -> Finding:
    host = loopback()
    try:
        with bound(host, 0, socket.SO_REUSEPORT, backlog=1) as listener:
            socket.create_connection(listener.getsockname()[:2], _ANSWER_S).close()
    except OSError as error:
        text = f"{host}: no connection ({error})"
        return Finding("fail", text, "`ip link set lo up`, or open the firewall for lo")
    return Finding("ok", f"{host}: a port was bound, and a connection made")


def _check_shared_memory() -> Finding:
    try:
        os.close(os.memfd_create("doctor"))
        free = shutil.disk_usage("/dev/shm").free  # noqa: S108 - it is asked about
    except (OSError, AttributeError) as error:
        remedy = (
            "Without memfd_create, large arrays travel through sockets; does a sandbox refuse it?"
        )
        return Finding("warn", f"memory cannot be shared ({error})", remedy)
    text = f"memory without a name can be had; /dev/shm has {free / _MIB:.1f} MiB free"
    remedy = "PyTorch, NCCL and multiprocessing use it, which we do not: docker run --shm-size=1g"
    return graded(text, free, remedy, enough=1024 * _MIB)


def _check_limit(kind: int, command: str) -> Finding:
    limits = [math.inf if each < 0 else each for each in resource.getrlimit(kind)]
    if kind == resource.RLIMIT_NPROC and os.geteuid() == 0:
        limits[0] = math.inf  # it does not hold for root
    text = f"{limits[0]} ({command}), at most {limits[1]}"
    remedy = f"`{command} 4096`, or nofile and nproc in limits.conf or --ulimit of the container"
    return graded(text, limits[0], remedy, enough=_ENOUGH, fewest=_FEWEST)


def _check_gpus() -> Finding:
    devices, source = visible_devices()
    if not devices:
        return Finding("none", f"{source} no GPU")
    if shutil.which("nvidia-smi") is None:
        return Finding("warn", f"{source} GPUs; there is no nvidia-smi", "Install the driver")
    command = ["nvidia-smi", "-L"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return judge_gpus(devices, f"ulimit -l: {locked}; {source}", asked.stdout or asked.stderr)


def judge_gpus(devices: Sequence[str], source: str, listed: str) -> Finding:
    """Judges the accelerators that programs see by what `nvidia-smi -L` says."""
    unknown = [
        each for each in devices if f"GPU {each}:" not in listed and f": {each}" not in listed
    ]
    text = f"{source} {', '.join(devices)}; nvidia-smi: {listed.strip()}"
    remedy = f"CUDA finds no {', '.join(unknown)}: correct CUDA_VISIBLE_DEVICES, or load the driver"
    return Finding("warn", text, remedy) if unknown else Finding("ok", text)


def _check_clock() -> Finding:
    require_running_clock()
    remedy = "Set the clock, which is behind: it would take new certificates for not valid yet"
    installed_s = Path(__file__).stat().st_mtime
    return graded(
        time.strftime("%Y-%m-%d %H:%M:%S %Z"), time.time(), remedy, enough=installed_s - 3600
    )


def _check_folder(find: Callable[[], Path], variable: str) -> Finding:
    try:
        folder = find()
        check_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return Finding("fail", str(error), f"Name another folder in {variable}")
    free = shutil.disk_usage(folder).free
    text = f"{folder}: writable, and no other user can replace files; {free // _MIB} MiB free"
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        remedy = f"Code compiled there, as by torch.compile, fails: another folder in {variable}"
        return Finding("warn", f"{text}; mounted noexec", remedy)
    return graded(text, free, "Free some: logs and checkpoints need it", enough=256 * _MIB)
