"""`python -m launchpad_lite.launch report`: what a bug report needs, in one file."""

import functools
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import courier
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching.crash import versions
from launchpad_lite.launching.registry import Inspector
from launchpad_lite.parts.as_json import to_json
from launchpad_lite.parts.log_file import end_of, find_logs
from launchpad_lite.parts.private_files import write_private

_TAIL_BYTES = 1 << 16  # of each log, and of each other file of a folder
_ABOUT = """\
A report {about}. It holds no arguments of nodes or the script, no values of variables, no secret of the program.
Logs and failures hold what your code printed, stacks hold lines of it: read them before you pass this on.

"""


def write_report(running: Inspector | None, log_dir: Path | None, output: str) -> str:
    """Writes a report on a running program, or (None) on a folder; returns what is inside."""
    parts: dict[str, Callable[[], Any]] = {"environment.txt": _environment}
    if running is not None:
        parts["status.json"] = lambda: to_json(running.status())
        parts["plan.json"] = running.plan
        parts["stacks.json"] = running.stacks
        parts["why.json"] = running.wait_graph
        parts["calls.json"] = lambda: running.ask("calls")
        parts["versions.txt"] = versions
    elif log_dir is not None:
        for path in sorted(
            (*log_dir.glob("*.txt"), *log_dir.glob("*/*.txt"), log_dir / "plan.json")
        ):
            if path.name != "plan.txt":  # it has flags of nodes
                parts[str(path.relative_to(log_dir))] = functools.partial(_tail, path)
    for _, path in find_logs(log_dir) if log_dir is not None else ():
        parts[f"logs/{path.relative_to(log_dir or path)}"] = functools.partial(_tail, path)
    found = {name: _text(make) for name, make in parts.items()}
    about = f"on {log_dir}" if running is None else f"on {running.status()[0]}"
    inside = "".join(f"{name}\n" for name in found)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in {"README.txt": _ABOUT.format(about=about) + inside, **found}.items():
            file.writestr(name, text.encode(errors="backslashreplace"))
    path = Path(output or "launchpad-report.zip").absolute()
    try:
        write_private(path, data.getvalue())
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error}; name another --output=") from error
    return f"{path}\n{inside}"


def _text(make: Callable[[], Any]) -> str:
    try:
        made = make()
    except (LaunchError, courier.CourierError, OSError) as error:
        return f"not to be had: {error}"
    return made if isinstance(made, str) else json.dumps(made, indent=1)


def _environment() -> str:
    return "".join(f"{name}\n" for name in sorted(os.environ) if name.startswith("LAUNCHPAD"))


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        text = end_of(file, _TAIL_BYTES).decode(errors="replace")
    return "".join(x for x in text.splitlines(True) if not x.startswith("arguments: "))
