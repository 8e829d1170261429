"""Checks which folders and files this user can trust, in places where others may write as well.

All other modules use this one. Users who may write to a folder can put links where we write, and
files where we read. So a folder that the user names may be shared with users who were given access.
Files that are run, unpickled or removed lie inside, in a folder of our own: made by us with mode
0700, it belongs to this user or root. So does a file that is read alone. Links are not followed,
and nothing waits for the other end of a FIFO.
"""

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

#: All processes in a pod belong to one owner, and volumes of pods are open to all users in it. Our
#: files there may get another user, or another mode.
_IN_POD = "KUBERNETES_SERVICE_HOST"
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for this user only; checks them all."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    if missing:
        check_folder(missing[-1].parent)  # else a stranger could enter them
    for each in reversed(missing):
        # Other processes of ours may make it at the same time.
        each.mkdir(mode=0o700, exist_ok=True)
    check_folder(folder)


def make_own_folder(folder: Path) -> Path:
    """Makes a folder as `make_folder`, and checks it as `check_own_folder`."""
    make_folder(folder)
    check_own_folder(folder)
    return folder


def check_own_folder(folder: Path) -> None:
    """Checks a folder; raises as `open_own_folder`."""
    os.close(open_own_folder(folder))


def open_own_folder(folder: Path) -> int:
    """Returns a descriptor of a folder, which stays the same if another takes its place.

    Raises:
        PermissionError: As `check_folder`; or it is a link, belongs to another user, or others may
            write to it.
    """
    check_folder(folder)
    if folder.is_symlink():
        raise _refusal(folder, "rm")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    if _is_own(os.fstat(descriptor), folder):
        return descriptor
    os.close(descriptor)
    raise _refusal(folder, "chmod go-w")


def user_name() -> str:
    """Returns the name of this process's user; the number of one without a name."""
    try:
        # Not from the environment, which may name an earlier user after `su`.
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user
        return str(os.geteuid())


def check_folder(folder: Path) -> None:
    """Refuses a folder where a stranger could replace files.

    A stranger is any user to whom no owner gave access. In a folder that everyone may write to, any
    user can make folders; without the sticky bit, any user can replace those of others, too. Other
    owners of folders on the way, and members of groups that may write there, were given access by
    an owner: of a project, or of a volume of a container.

    Raises:
        PermissionError: A stranger could; it names the unsafe folder.
    """
    folder.stat()  # raises if it is missing, or a link on the way is broken
    for each in _way(folder.absolute()):
        status = each.lstat()
        if each.parent.stat().st_mode & stat.S_IWOTH and not _is_users(status):
            raise _refusal(each, "rm")
        if _is_open(status.st_mode):
            raise _refusal(each, "chmod o-w")


def _way(path: Path) -> Iterator[Path]:
    """Yields the folders and links on the way: a link may be a stranger's, and lead anywhere."""
    for each in (*reversed(path.parents), path):
        yield each
        if each.is_symlink():
            yield from _way(each.parent / each.readlink())


def _is_open(mode: int) -> bool:
    is_writable = mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not stat.S_ISLNK(mode)
    return bool(is_writable) and _IN_POD not in os.environ


def _is_users(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _is_own(status: os.stat_result, folder: Path) -> bool:
    """Returns whether only this user and root may write to a folder, or to a file in it."""
    if _IN_POD in os.environ or status.st_mode & 0o022:
        return _IN_POD in os.environ
    if _is_users(status):
        return True
    import tempfile

    # A network drive may give files of this process to another user.
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as ours:
        return os.fstat(ours.fileno()).st_uid == status.st_uid
    return False


def _refusal(path: Path, command: str) -> PermissionError:
    """Returns the error with the owner of a file or folder, and the command that corrects it."""
    import shlex

    status = path.lstat()
    if not _is_users(status) and not stat.S_ISLNK(status.st_mode):
        command = f"chown -R {user_name()}"
    return PermissionError(
        f"{path}: others could replace what is there (it is {stat.filemode(status.st_mode)}, of user "
        f"{status.st_uid}). Name another place; or, if you trust what is in it: "
        f"{command} {shlex.quote(str(path))}"
    )


def open_private(path: Path, *, is_new: bool = False) -> int:
    """Returns a descriptor for appending to a file, which is made for this user only.

    Its folder must have been checked. A link is an OSError. `is_new` replaces an existing file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _OPEN
    if is_new:
        path.unlink(missing_ok=True)
        flags |= os.O_EXCL
    return os.open(path, flags, 0o600)


def open_to_read(path: Path, *, dir_fd: int | None = None) -> int:
    """Returns a descriptor of a file that only this user or root could have written.

    Its folder must have been checked; with `dir_fd`, its descriptor, no other user can put another
    folder in its place. A link is an OSError.

    Raises:
        PermissionError: Others could have, or it is a FIFO or the like.
    """
    name = path if dir_fd is None else path.name
    descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=dir_fd)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and _is_own(status, path.parent):
        return descriptor
    os.close(descriptor)
    whose = f"it is {stat.filemode(status.st_mode)}, of user {status.st_uid}"
    raise PermissionError(errno.EPERM, whose, str(path))


def read_private(path: Path) -> bytes:
    """Returns the content of a user's file; raises as `check_folder` and `open_to_read`."""
    check_folder(path)
    with os.fdopen(open_to_read(path.resolve()), "rb") as file:
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Writes a file for this user only, in a folder that was checked: atomically."""
    aside = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    try:
        with os.fdopen(open_private(aside, is_new=True), "wb") as file:
            file.write(content)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
