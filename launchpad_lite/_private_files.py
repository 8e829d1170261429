"""Folders and files that are this user's own, in places where others may write as well.

A user who may write to a folder may put a link where we are going to write, and have our output appended
to any file of ours. So folders are looked at before they are used, and links are not followed.
"""

import os
import pwd
import stat
from pathlib import Path

#: All that runs in a pod belongs to one owner, and volumes of pods are open to all users in it.
_IN_POD = "KUBERNETES_SERVICE_HOST"


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for this user only; checks them all.

    Raises:
        PermissionError: As `check_folder`.
        OSError: It cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    if missing:
        check_folder(missing[-1].parent)  # else a stranger would find them
    for each in reversed(missing):
        # Others of our processes may make it at the same time.
        each.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)


def make_own_folder(folder: Path) -> Path:
    """Makes a folder as `make_folder`, whose name everybody can guess; returns it.

    Raises:
        PermissionError: It is a link, another user's, or others may write to it.
        OSError: It cannot be made.
    """
    make_folder(folder)
    status = folder.lstat()
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not (is_closed and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()):
        raise refusal(folder)
    return folder


def user_name() -> str:
    """Returns the name of this process's user; the number of one without a name."""
    try:
        # Not from the environment: after `su` that may name the user before.
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user
        return str(os.geteuid())


def check_folder(folder: Path) -> None:
    """Refuses a folder where a stranger could replace what is written.

    A stranger is any user to whom no owner gave access. In a folder that everyone may write to, each can make
    folders; without the sticky bit, each can replace those of others, too. Who else owns a folder on
    the way, or shares a group that may write there, was given access by someone who could: the owner of a
    project, or of what a container mounts.

    Raises:
        PermissionError: A stranger could; it names the folder that is to blame.
        OSError: It cannot be looked at.
    """
    # As it is called, for a link may be a stranger's; and as it is, for links lead anywhere.
    for path in dict.fromkeys((folder.absolute(), folder.resolve())):
        for each in (*reversed(path.parents), path):
            status = each.lstat()
            is_anybodys = bool(each.parent.stat().st_mode & stat.S_IWOTH)
            is_foreign = status.st_uid not in (0, os.geteuid())
            if (is_foreign and is_anybodys) or _is_open(status.st_mode):
                raise refusal(each)


def _is_open(mode: int) -> bool:
    """Returns whether everybody may replace what lies in a folder."""
    is_writable = mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not stat.S_ISLNK(mode)
    return bool(is_writable) and _IN_POD not in os.environ


def refusal(path: Path) -> PermissionError:
    """Returns the error that says whose a folder is."""
    status = path.lstat()
    whose = f"it is {stat.filemode(status.st_mode)}, of user {status.st_uid}"
    return PermissionError(f"{path}: others could replace what is written there ({whose})")


def open_private(path: Path, *, is_new: bool = False) -> int:
    """Returns a descriptor to add to a file, which is made for this user only.

    Args:
        path: Of a file in a folder that was checked.
        is_new: Whether to have a new file in place of one that is there.

    Raises:
        OSError: It cannot be opened, for instance because it is a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    if is_new:
        path.unlink(missing_ok=True)
        flags |= os.O_EXCL
    return os.open(path, flags, 0o600)
