"""The first program on a host: reports what is there, gets what is missing, becomes the agent.

The launcher sends it as text to an interpreter of unknown version that has none of our packages. So
it imports only the standard library, and Python 3.8 can run it. Frames have the format of
`launchers.host.link`: ship comes in; facts, note, ready or failed go out. After `ready`,
the agent continues at the same descriptors.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import platform
import select
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

#: Comes before the first frame, because shells may print any text first.
MARKER = b"\0launchpad-lite agent\0"
_HEADER = struct.Struct("!IQ")
#: Seconds after which unused trees are removed.
_KEEP_S = 30 * 24 * 3600
#: The text of this module. The sender sets it, because the module is no file on the host.
SOURCE = ""
#: How many lines are shown of an installation that failed.
_LAST_LINES = 20
#: Seconds to wait until the launcher has packed code.
_PACKING_S = 60.0
#: How many waits in turn make up the silence after which the launcher counts as gone.
_TURNS = 8
#: Seconds between two checks of an installation.
_LOOK_S = 0.1


def main(hello: "dict[str, Any]", *, is_first: bool = True) -> None:
    """Exchanges messages with the launcher, which said `hello`, then becomes the agent."""
    link = _LauncherLink()
    if is_first:
        os.write(link.output, MARKER)
    try:
        if is_first and hello["requirements"] is not None:
            _go_on_in_environment(link, hello)
        cache = _CodeCache(hello["cache"])
        missing = [key for key in hello["trees"] if not cache.has_tree(key)]
        link.write("facts", missing=missing, **facts(hello["packages"]))
        shipped = link.read("ship")
        link.silence_s = hello["silence_s"]
        for key, size in shipped["sizes"].items():
            cache.add_tree(key, link.take(size))
        folders = [cache.tree(key) for key in hello["trees"]]
        sys.path[:0] = folders
        cache.prune()
        os.environ[hello["mark_variable"]] = hello["mark"]
        os.chdir(_folder(hello))
        from launchers.host.agent import main as become_agent
    except Exception as error:  # noqa: BLE001 - the launcher tells the user
        link.write("failed", text=_explain(error, hello))
        sys.exit(1)
    link.write("ready")
    link.restore()
    become_agent(None, hello["silence_s"], in_pod=hello["in_pod"])


def is_spoken_to(silence_s: float, listen: "Callable[[float], object]") -> bool:
    """Returns whether something comes before the launcher counts as gone; `listen` waits for it."""
    # A sleep of the machine uses up one wait. During the others, processes on the way (ssh), which slept as
    # well, pass messages on.
    return any(listen(silence_s / _TURNS) for _ in range(_TURNS))


class _LauncherLink:
    """The link to the launcher at standard input and output, which nothing else uses meanwhile."""

    def __init__(self) -> None:
        self.output = os.dup(1)
        os.dup2(2, 1)
        #: Seconds of silence after which the launcher counts as gone.
        self.silence_s = _PACKING_S

    def read(self, op: str) -> "dict[str, Any]":
        length, _ = _HEADER.unpack(self.take(_HEADER.size))
        fields: "dict[str, Any]" = json.loads(self.take(length).decode())
        if fields["op"] != op:
            raise ValueError("the launcher said %r instead of %r" % (fields["op"], op))
        return fields

    def take(self, size: int) -> bytes:
        """Reads so many bytes and not one more: the agent reads the next."""
        data = bytearray()
        while len(data) < size:
            # Silence: the launcher is gone, or the link is cut, which sshd may not notice for hours.
            is_there = is_spoken_to(self.silence_s, lambda s: select.select([0], [], [], s)[0])
            piece = os.read(0, min(size - len(data), 1 << 20)) if is_there else b""
            if not piece:
                sys.exit(0)
            data += piece
        return bytes(data)

    def write(self, op: str, **fields: Any) -> None:
        head = json.dumps(dict(fields, op=op)).encode()
        data = _HEADER.pack(len(head), 0) + head
        while data:
            data = data[os.write(self.output, data) :]

    def restore(self) -> None:
        os.dup2(self.output, 1)
        os.close(self.output)


def _folder(hello: "dict[str, Any]") -> str:
    """Returns the working directory of nodes."""
    # If all hosts share a file system, nodes find the files that the script finds.
    folder = str(hello["folder"])
    try:
        if hello["in_pod"]:  # most of its files are read-only, whatever their permissions
            tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        folder = ""
    return folder if os.path.isdir(folder) else os.path.expanduser("~")


def facts(packages: "Iterable[str]") -> "dict[str, Any]":
    """Returns what there is of Python, and the versions of these packages."""
    return {
        "python": list(sys.version_info[:3]),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "platform": [sys.platform, platform.machine(), platform.libc_ver()[0]],
        "packages": {name: _version_of(name) for name in packages},
    }


def _version_of(name: str) -> "str | None":
    from importlib import metadata  # many programs require nothing

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _explain(error: Exception, hello: "dict[str, Any]") -> str:
    if not isinstance(error, OSError):
        return "%s: %s" % (type(error).__name__, error)
    where = error.filename or hello["cache"] or "the home folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "no space is left for code in %s: free some, or name another folder in cache=" % where
        )
    return "%s: %s" % (where, error.strerror or error)


class _CodeCache:
    """This user's folder of code that was sent before, each tree under its digest."""

    def __init__(self, folder: "str | None") -> None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        root = os.path.expanduser(folder) if folder else os.path.join(base, "launchpad_lite")
        self._root = os.path.realpath(root)  # a link may lead elsewhere a moment later
        umask = os.umask(0o077)  # for the parent folders, too, which get another mode by default
        os.makedirs(self._root, mode=0o700, exist_ok=True)
        os.umask(umask)
        status = os.stat(self._root)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            self._refuse(self._root)
        # A user who may write to a parent folder can replace this one. In a pod, all files have one owner.
        above = os.path.dirname(self._root)
        while above != os.path.dirname(above) and "KUBERNETES_SERVICE_HOST" not in os.environ:
            found, above_it = os.stat(above), os.stat(os.path.dirname(above))
            # All may write there, without the sticky bit; or another user made it where all may write.
            is_strangers = found.st_uid not in (0, os.geteuid()) and above_it.st_mode & 0o002
            if found.st_mode & 0o1002 == 0o002 or is_strangers:
                self._refuse(above)
            above = os.path.dirname(above)

    def _refuse(self, folder: str) -> None:
        reason = "others may write there: code is not taken from it"
        raise PermissionError(errno.EPERM, reason, folder)

    def tree(self, key: str) -> str:
        return os.path.join(self._root, "trees", key)

    def has_tree(self, key: str) -> bool:
        with contextlib.suppress(OSError):
            os.utime(self.tree(key))  # marks it as used, so that no other agent removes it as old
        return os.path.isdir(self.tree(key))

    def add_tree(self, key: str, archive: bytes) -> None:
        os.makedirs(os.path.dirname(self.tree(key)), mode=0o700, exist_ok=True)
        aside = tempfile.mkdtemp(prefix=".new-", dir=os.path.dirname(self.tree(key)))
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
                for member in tar:
                    parts = member.name.split("/")
                    if not member.isfile() or ".." in parts or member.name.startswith("/"):
                        raise ValueError("%r has no place in an archive of code" % member.name)
                    path = os.path.join(aside, *parts)
                    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                    content = tar.extractfile(member)
                    assert content is not None
                    with open(path, "wb") as file:
                        shutil.copyfileobj(content, file)
                    os.chmod(path, 0o700 if member.mode & 0o100 else 0o600)
            os.rename(aside, self.tree(key))
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            # No error if another agent with the same home was faster.
            if not (isinstance(error, OSError) and self.has_tree(key)):
                raise

    def prune(self) -> None:
        """Removes trees that were not used for long."""
        trees = os.path.join(self._root, "trees")
        for name in os.listdir(trees):
            path = os.path.join(trees, name)
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > _KEEP_S:
                    # Moved away first: an agent would use a tree that is half removed.
                    aside = tempfile.mkdtemp(prefix=".old-", dir=trees)
                    os.rename(path, os.path.join(aside, name))
                    shutil.rmtree(aside, ignore_errors=True)

    def environment(self, requirements: str) -> str:
        # Hosts with different interpreters may share a home.
        version = "%d.%d" % sys.version_info[:2]
        parts = (version, os.path.realpath(sys.executable), platform.machine(), requirements)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        return os.path.join(self._root, "environments", digest[:32])


def _go_on_in_environment(link: _LauncherLink, hello: "dict[str, Any]") -> None:
    """Replaces this process by one in an environment with the requirements, which it makes if needed."""
    folder = _CodeCache(hello["cache"]).environment(hello["requirements"])
    python = os.path.join(folder, "bin", "python")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # agents of other hosts may share this home
        done = os.path.join(folder, "complete")
        if not os.path.exists(done):
            link.write("note", text="installing what is required, in %s" % folder)
            _install(folder, python, hello["requirements"])
            with open(done, "w"):
                pass
    with tempfile.TemporaryFile() as file:
        source = "\nSOURCE = %r\nmain(json.loads(%r), is_first=False)\n"
        file.write((SOURCE + source % (SOURCE, json.dumps(hello))).encode())
        file.seek(0)
        descriptor = os.dup(file.fileno())
    os.set_inheritable(descriptor, True)
    os.dup2(link.output, 1)
    loader = "import os, sys; sys.path[:] = filter(None, sys.path); exec(os.fdopen(%d).read())"
    os.execv(python, [python, "-c", loader % descriptor])  # noqa: S606 - no shell is wanted


def _install(folder: str, python: str, requirements: str) -> None:
    path = os.path.join(folder, "requirements.txt")
    with open(path, "w") as file:
        file.write(requirements)
    for command in (
        [sys.executable, "-m", "venv", folder],
        [python, "-m", "pip", "install", "--quiet", "--requirement", path],
    ):
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while process.poll() is None:
                # The launcher sends nothing before it has the facts, so its end of the link was closed.
                if select.select([0], [], [], _LOOK_S)[0]:
                    os.killpg(process.pid, signal.SIGKILL)
                    sys.exit(0)
            if process.returncode:
                output.seek(0)
                lines = output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
                raise RuntimeError("%s failed:\n%s" % (" ".join(command), "\n".join(lines)))
