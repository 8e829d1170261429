"""The folder of a run, through which the job and the watching process exchange files.

Only the user may read it (mode 0700, files 0600). The state of the run is in JSON files below `run`,
each of which appears complete. The job writes them, except `stop` and `question`: by these a watching
process asks the job to end, and asks it about its nodes.
"""

import contextlib
import json
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.hosts.host_options import HostOptions
from launchers.hosts.orders import Order
from launchers.slurm._script import Component
from launchpad_lite.errors import LaunchError
from launchpad_lite.parts.as_json import from_json, to_json
from launchpad_lite.parts.private_files import (
    check_own_folder,
    make_folder,
    read_private,
    write_private,
)

#: Seconds between two writes of the nodes' status by the supervisor.
NOTE_S = 2.0
#: The file with order, work and code.
WORK = "work.pickle"


@dataclass(frozen=True, kw_only=True)
class JobOrder(Order):
    """What a job is to run: its hosts with the nodes on each, and the user's options for them."""

    supervisor = "launchers.slurm._job"
    advice = "on the first host: name another interpreter, python="
    failure = "run/failure"

    components: tuple[Component, ...]
    wanted: HostOptions
    requeue: bool


class RunFolder:
    """The folder of a run, by its absolute path."""

    def __init__(self, path: Path) -> None:
        """Neither reads nor makes it."""
        self.path = path
        self.script = path / "job.sh"
        self.output = path / "job.out"
        self.logs = path / "logs"
        self._run = path / "run"

    def write_submission(self, files: Mapping[str, bytes]) -> None:
        """Makes the folder, with these files in it.

        Raises:
            LaunchError: It cannot be made, others could replace it, or another run is in it.
        """
        try:
            make_folder(self.path)
            self.path.chmod(0o700)
            check_own_folder(self.path.resolve())
            # Made first, so that the second of two launches with one folder fails.
            self._run.mkdir(mode=0o700)
            with contextlib.ExitStack() as undo:
                undo.callback(self.forget)
                for name, content in files.items():
                    path = self.path / name
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    write_private(path, content)
                undo.pop_all()
        except FileExistsError:
            raise LaunchError(
                f"{self.path} holds a run already; name another folder in log_dir=, or remove it"
            ) from None
        except OSError as error:
            raise LaunchError(
                f"cannot write the folder of the run: {error}. Name one that all hosts of the "
                "cluster see, and no stranger can replace, in folder="
            ) from error

    def forget(self) -> None:
        """Removes a run that did not begin, so that another one can use the folder."""
        shutil.rmtree(self._run, ignore_errors=True)

    def check_owner(self) -> None:
        """Refuses a folder that is not the user's own, because its files are unpickled."""
        try:
            check_own_folder(self.path.resolve())
            read_private(self.path / WORK)
        except OSError as error:
            raise LaunchError(f"no run of a Slurm job is read in {self.path}: {error}") from error

    def read_order(self) -> JobOrder:
        order: JobOrder = pickle.loads(pickle.loads(read_private(self.path / WORK))["order"])
        return order

    def begin(self, job: str) -> None:
        """Removes the files of an earlier run of the job; called when the job starts."""
        self._run.mkdir(mode=0o700, exist_ok=True)
        for path in self._run.glob("[!.]*"):  # files that are being written are of this run
            path.unlink(missing_ok=True)
        self.write("job", job)
        self.write("begun", True)

    def write(self, name: str, value: Any) -> None:
        write_private(self._run / name, json.dumps(to_json(value)).encode())

    def read(self, name: str, kind: Any) -> Any:
        """Returns what was written, as `from_json` reads this kind; None if there is no file."""
        with contextlib.suppress(OSError):
            return from_json(kind, json.loads((self._run / name).read_bytes()))
        return None

    def stamp(self, name: str) -> tuple[int, int] | None:
        """Returns a value that changes with each write of a file; None: there is no file."""
        with contextlib.suppress(OSError):
            status = (self._run / name).stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def refresh(self) -> None:
        """Makes a network drive look for new files."""
        with contextlib.suppress(OSError):
            list(self._run.iterdir())
