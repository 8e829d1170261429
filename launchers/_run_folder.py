"""The folder of one run of a program: output of the nodes, and what is known of a failure."""

import contextlib
import datetime as dt
import errno
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from launchpad_lite._log_file import LOG_DIR_VARIABLE, folder_of_runs
from launchpad_lite._private_files import make_folder, make_own_folder
from launchpad_lite._registry import running_programs
from launchpad_lite._result import Outcome, ProgramResult
from launchpad_lite.errors import LaunchError

#: How many of them are kept in the default place; the default without that variable.
KEEP_VARIABLE = "LAUNCHPAD_KEEP_RUNS"
_KEPT_RUNS = 50
#: Seconds in which a folder has not changed that is removed: its program may run on another machine.
_LEAST_AGE_S = 24 * 60 * 60.0
_RUN_NAME = re.compile(r".+-(\d{8}-\d{6})-[0-9a-f]{6}")


def make_run_folder(program: str, named: Path | None = None) -> Path:
    """Returns the folder for a run of a program, made for this user only, as an absolute path.

    A new one below a folder that the user has not named takes the place of the oldest ones there.

    Args:
        program: Its name.
        named: What the user has chosen; None: a new one.

    Raises:
        LaunchError: It cannot be made or written to, or others could replace what is written there,
            or the number of folders to keep is none.
    """
    try:
        folder = (named or _make_base() / run_name(program)).absolute()
        # Output may hold anything, so no other user may read it.
        make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "this user may not write to it", str(folder))
    except OSError as error:
        raise LaunchError(
            f"cannot make the folder for logs: {error}. Remove what is in the way, or name another "
            f"in {LOG_DIR_VARIABLE}, or pass log_dir="
        ) from error
    return folder


def _make_base() -> Path:
    """Makes the folder for those of all runs; removes old ones unless the user has named it."""
    base = folder_of_runs()
    if os.environ.get(LOG_DIR_VARIABLE):
        make_folder(base)
        return base
    # Everybody can guess its name, and may have been there first.
    make_own_folder(base)
    _remove_old_runs(base, _runs_to_keep() - 1)
    return base


def _runs_to_keep() -> int:
    text = os.environ.get(KEEP_VARIABLE) or str(_KEPT_RUNS)
    if re.fullmatch("[0-9]+", text) and int(text) > 0:
        return int(text)
    raise LaunchError(
        f"{KEEP_VARIABLE}={text}: it is how many folders of runs are kept, a whole number from 1 up; "
        f"to keep all, name a folder of your own in {LOG_DIR_VARIABLE}"
    )


def _remove_old_runs(base: Path, keep: int) -> None:
    """Removes the oldest folders of runs but so many, as far as that can be done.

    Args:
        base: Where they are; this user's own.
        keep: How many stay. Those that may be in use stay as well.
    """
    # What cannot be read is no reason not to launch.
    with contextlib.suppress(OSError):
        runs = [
            (match[1], entry.path, entry.stat(follow_symlinks=False).st_mtime)
            for entry in os.scandir(base)
            if (match := _RUN_NAME.fullmatch(entry.name))
            and entry.is_dir(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        ]
        before = time.time() - _LEAST_AGE_S
        oldest = sorted(runs)[: max(0, len(runs) - keep)]
        # First what costs least to ask: most of those that are kept are of the last hours.
        old = [Path(path) for _, path, changed_at in oldest if changed_at < before]
        if not old:
            return
        entries, passed_over = running_programs()
        if passed_over:
            return  # a program of another version may use any of them
        used = {Path(each.log_dir).resolve() for each in entries if each.log_dir}
        for path in old:
            if path.resolve() not in used and _is_unchanged_since(path, before):
                shutil.rmtree(path, ignore_errors=True)


def _is_unchanged_since(folder: Path, since: float) -> bool:
    """Returns whether nothing in a folder was changed after a time, in seconds since 1970."""
    return all(path.lstat().st_mtime < since for path in folder.rglob("*"))


def closing_line(program: str, result: ProgramResult | None, log_dir: Path | None) -> str:
    """Returns the last line of a program that ended well; empty without logs, or after a failure, which names them.

    Args:
        program: Its name.
        result: How it ended.
        log_dir: Where its logs are.
    """
    if log_dir is None or result is None or result.outcome is Outcome.FAILED:
        return ""
    return f"{program}: {result.outcome.value}; logs in {log_dir}"


def run_name(program: str) -> str:
    """Returns a name for the folder of a new run of a program."""
    now = dt.datetime.now(dt.timezone.utc).astimezone()
    return f"{program}-{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
