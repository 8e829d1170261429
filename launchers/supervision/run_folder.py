"""The folder of one run of a program: output of the nodes, and the report of a failure."""

import contextlib
import datetime as dt
import errno
import os
import re
import shutil
import time
import uuid
from pathlib import Path

from launchers.supervision.logs import CALLS
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching.registry import running_programs
from launchpad_lite.parts.log_file import LOG_DIR_VARIABLE, make_folder_of_runs
from launchpad_lite.parts.private_files import make_folder

#: Variable for how many folders are kept in the default place; and its default value.
KEEP_VARIABLE = "LAUNCHPAD_KEEP_RUNS"
_KEPT_RUNS = 50
#: Only folders unchanged for so many seconds are removed: a program may run on another machine.
_LEAST_AGE_S = 24 * 60 * 60.0
_MADE_AT = "%Y%m%d-%H%M%S"
#: The end of the name of a run's folder: when the folder was made, and some digits.
_MADE = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{6}$")


def make_run_folder(program: str, named: Path | None = None) -> Path:
    """Returns the folder for a run of a program, made for this user only, as an absolute path."""
    try:
        folder = (named or _make_base() / run_name(program)).absolute()
        # Output may hold anything, so no other user may read it.
        make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, "this user may not write to it", str(folder))
        for old in folder.glob(f"*/*{CALLS}") if named else ():
            old.unlink(missing_ok=True)  # of an earlier run
    except OSError as error:
        raise LaunchError(
            f"cannot make the folder for logs: {error}. Remove what is in the way, or name another "
            f"in {LOG_DIR_VARIABLE}, or pass log_dir="
        ) from error
    return folder


def _make_base() -> Path:
    base = make_folder_of_runs()
    if not os.environ.get(LOG_DIR_VARIABLE):
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
    """Removes the oldest folders of runs, all but `keep` and those that may be in use."""
    # A folder that cannot be read must not prevent a launch.
    with contextlib.suppress(OSError):
        # Sorted by name, which is cheap: there may be thousands, most of the last hours.
        entries = os.scandir(base)
        runs = {found[0]: each for each in entries if (found := _MADE.search(each.name))}
        made = sorted(runs)
        before = time.time() - _LEAST_AGE_S
        made_before = time.strftime(f"-{_MADE_AT}", time.localtime(before))
        oldest = [runs[each] for each in made[: max(0, len(made) - keep)] if each < made_before]
        old = [Path(entry) for entry in oldest if entry.is_dir(follow_symlinks=False)]
        if not old:
            return
        running, passed_over = running_programs()
        if passed_over:
            return  # a program of another version may use any of them
        used = {Path(each.log_dir).resolve() for each in running if each.log_dir}
        for path in old:
            if path.resolve() not in used and _is_own_and_unchanged_since(path, before):
                shutil.rmtree(path, ignore_errors=True)


def _is_own_and_unchanged_since(folder: Path, since: float) -> bool:
    is_own = folder.lstat().st_uid == os.geteuid()
    return is_own and all(each.lstat().st_mtime < since for each in (folder, *folder.rglob("*")))


def run_name(program: str) -> str:
    """Returns a name for the folder of a new run of a program."""
    now = dt.datetime.now(dt.timezone.utc).astimezone()
    return f"{program}-{now:{_MADE_AT}}-{uuid.uuid4().hex[:6]}"
