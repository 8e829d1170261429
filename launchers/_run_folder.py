"""The folder of one run of a program: output of the nodes, and what is known of a failure."""

import datetime as dt
import os
import tempfile
import uuid
from pathlib import Path

from launchpad_lite._private_files import make_folder, make_own_folder, user_name
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
        base = Path(tempfile.gettempdir(), f"launchpad_lite-{user_name()}")
    # Everybody can guess its name, and may have been there first.
    return make_own_folder(base)


def run_name(program: str) -> str:
    """Returns a name for the folder of a new run of a program."""
    now = dt.datetime.now(dt.timezone.utc).astimezone()
    return f"{program}-{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
