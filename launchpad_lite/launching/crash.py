"""Reports of failed programs: a folder to read, or to send with a bug report."""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from launchpad_lite._version import __version__
from launchpad_lite.life.result import ProgramResult, description, gathered
from launchpad_lite.parts.private_files import make_own_folder, open_private
from launchpad_lite.planning.plan import LaunchPlan


def write_crash_report(
    folder: Path, plan: LaunchPlan, result: ProgramResult, stacks: Mapping[str, str], why: str = ""
) -> None:
    """Writes the reports of a failure to a folder that is made for this user only.

    `stacks` are those of each node, by its name, when the program failed; `why`: who waited for whom
    when nodes were ended by force.
    """
    make_own_folder(folder / "stacks")
    for old in (folder / "stacks").glob("*.txt"):
        old.unlink()  # of an earlier run, whose nodes may have been others
    files = {
        "report.txt": _report(result) + (why and f"\nBefore nodes were ended by force:\n{why}\n"),
        "plan.txt": f"{plan}\nseed: {plan.seed}\n",
        "plan.json": json.dumps(plan.as_json()),
        "versions.txt": f"{versions()}\narguments: {sys.argv}\n",
    }
    files.update({f"stacks/{node}.txt": text for node, text in stacks.items()})
    for name, text in files.items():
        descriptor = open_private(folder / name, is_new=True)
        # Messages may contain names of files that are not UTF-8.
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)


def _report(result: ProgramResult) -> str:
    parts = [description(alike) for alike in gathered(result.failures)]
    for each in result.failures:
        if each.report is not None:  # the others have told it
            parts += [f"{each.node}: {calls}" for calls in each.last_calls()]
    if result.restarts:
        parts.append("\n".join(["Restarts:", *(each.describe() for each in result.restarts)]))
    if result.killed:
        parts.append(f"Ended by force after the notice: {', '.join(result.killed)}")
    return "\n\n".join(parts) + "\n"


def versions() -> str:
    """Returns the versions of this package, of Python, and of all that is installed."""
    lines = [f"launchpad-lite {__version__}", f"Python {sys.version}", platform.platform(), ""]
    packages = set[str]()
    for distribution in importlib.metadata.distributions():
        # One broken package must not hide the others.
        with contextlib.suppress(Exception):
            packages.add(f"{distribution.metadata['Name']} {distribution.version}")
    return "\n".join([*lines, *sorted(packages, key=str.lower)]) + "\n"
