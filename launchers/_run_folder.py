"""The folder of one run of a program: output of the nodes, and what is known of a failure."""

import contextlib
import datetime as dt
import os
import pwd
import stat
import tempfile
import uuid
from pathlib import Path

from launchpad_lite._private_files import make_folder, refusal
from launchpad_lite.errors import LaunchError

#: Where the folders of runs go, unless a launch says otherwise; the original's name.
LOG_DIR_VARIABLE = "LAUNCHPAD_LOGGING_DIR"


def make_run_folder(program: str, named: Path | None = None) -> Path:
    """Returns the folder for a run of a program, made for this user only, as an absolute path.

    Args:
        program: Its name.
        named: What the user has chosen; None: a new one.

    Raises:
        LaunchError: It cannot be made, or others could replace what is written there.
    """
    try:
        folder = (named or _make_base() / run_name(program)).absolute()
        # Output may hold anything, so it is nobody else's to read.
        make_folder(folder)
    except OSError as error:
        raise LaunchError(
            f"cannot make the folder for logs: {error}. Remove what is in the way, or name another "
            f"in {LOG_DIR_VARIABLE}, or pass log_dir="
        ) from error
    return folder


def _make_base() -> Path:
    """Makes the folder for those of all runs."""
    if named := os.environ.get(LOG_DIR_VARIABLE):
        base = Path(named)
        make_folder(base)
        return base
    # Not XDG_RUNTIME_DIR: it is in memory, which logs would fill, and ends with the session.
    if state := os.environ.get("XDG_STATE_HOME"):
        base = Path(state, "launchpad_lite")
    else:
        base = Path(tempfile.gettempdir(), f"launchpad_lite-{_user()}")
    make_folder(base)
    # Everybody can guess its name, and may have been there first.
    if not _is_ours(base):
        raise refusal(base)
    return base


def _is_ours(path: Path) -> bool:
    """Tells whether it is a folder, and no link, that only this user may write to."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return is_closed and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def run_name(program: str) -> str:
    """Returns a name for the folder of a new run of a program."""
    now = dt.datetime.now(dt.timezone.utc).astimezone()
    return f"{program}-{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def _user() -> str:
    try:
        # Not from the environment: after `su` that may name the user before.
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.geteuid())
