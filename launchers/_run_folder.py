"""The folder of one run of a program: output of the nodes, and what is known of a failure."""

import datetime as dt
import getpass
import os
import tempfile
import uuid
from pathlib import Path

from launchpad_lite.errors import LaunchError

#: Where the folders of runs go, unless a launch says otherwise; the original's name.
LOG_DIR_VARIABLE = "LAUNCHPAD_LOGGING_DIR"


def make_run_folder(program: str) -> Path:
    """Makes a new folder for a run of a program, for this user only.

    Raises:
        LaunchError: It cannot be made.
    """
    base = os.environ.get(LOG_DIR_VARIABLE)
    root = Path(base) if base else Path(tempfile.gettempdir()) / f"launchpad_lite-{_user()}"
    folder = root / run_name(program)
    # Output may hold anything, so it is nobody else's to read.
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise LaunchError(
            f"cannot make the folder for logs: {error}. Name another in {LOG_DIR_VARIABLE}, or "
            "pass log_dir="
        ) from error
    return folder


def run_name(program: str) -> str:
    """Returns a name for the folder of a new run of a program."""
    now = dt.datetime.now(dt.timezone.utc).astimezone()
    return f"{program}-{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
