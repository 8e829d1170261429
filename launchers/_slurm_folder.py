"""The folder of a run, which both sides see: what is submitted, and what the job writes there.

It belongs to the user alone (0700, files 0600). What the job writes is complete as soon as it is
there: it is written aside and renamed.
"""

import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from courier import Secret, TlsCredentials
from courier._parcel import dumps
from launchers._deployment import Tunnel
from launchers._elsewhere import Order
from launchers._placement import PlacementChoice, Strategy
from launchers._shipping import Shipment, Tree
from launchers._slurm_script import Component
from launchers.host import boot
from launchpad_lite._as_json import from_json, to_json
from launchpad_lite._private_files import check_own_folder, make_folder, read_private, write_private
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    LaunchPlan,
    NodeStatus,
    ProgramResult,
)

#: Seconds between two notes of the supervisor how the nodes are.
NOTE_S = 2.0
#: Put behind the text of `launchers.host.boot`, whose cache of code it uses: all that runs before
#: our packages are there.
_BEGIN = '''

def begin(folder):
    """Makes the code of the program importable, and becomes its supervisor."""
    try:
        with open(os.path.join(folder, "order.json")) as file:
            order = json.load(file)
        if list(sys.version_info[:2]) != order["python"]:
            raise RuntimeError(
                "%s is Python %d.%d, the program was launched by %d.%d: name another interpreter, "
                "python=" % ((sys.executable,) + sys.version_info[:2] + tuple(order["python"]))
            )
        cache = _Cache(order["cache"])
        for key in order["trees"]:
            if not cache.has_tree(key):
                with open(os.path.join(folder, "code", key + ".tar.gz"), "rb") as file:
                    cache.add_tree(key, file.read())
        trees = [cache.tree(key) for key in order["trees"]]
        sys.path[:1] = trees
        from launchers._slurm_job import main as supervise
    except Exception as error:
        os.makedirs(os.path.join(folder, "run"), exist_ok=True)
        with open(os.path.join(folder, "run", "failure"), "w") as file:
            file.write("%s: %s" % (type(error).__name__, error))
        raise
    sys.exit(supervise(folder, trees))


begin(os.path.dirname(os.path.abspath(__file__)))
'''


@dataclass(frozen=True, kw_only=True)
class JobOrder(Order):
    """What a job is to run.

    Attributes:
        components: Hosts of the job, and what is to run on which.
        choice: Which nodes may run where.
        strategy: How others are placed.
        tunnel: When calls between hosts go by way of the supervisor.
        python: Interpreter on the hosts.
        requirements: What to install there.
        cache: Folder there for code.
        requeue: Whether the job may run again.
        trees: Keys of the code, in the order of the path; names of files and size of each.
    """

    components: tuple[Component, ...]
    choice: PlacementChoice
    strategy: Strategy
    tunnel: Tunnel
    python: str
    requirements: str | None
    cache: str | None
    requeue: bool
    trees: Mapping[str, tuple[tuple[str, ...], int]]

    def shipment(self, folders: Mapping[str, str]) -> Shipment:
        """Returns the code as it is in these folders, by key."""
        return Shipment(
            tuple(
                Tree(key, {name: Path(folders[key]) / name for name in names}, size)
                for key, (names, size) in self.trees.items()
            ),
            self.requires,
        )


@dataclass(frozen=True)
class End:
    """How a run of a job ended.

    Attributes:
        result: Of the program.
        crash_dir: Folder with all that is known of a failure.
    """

    result: ProgramResult
    crash_dir: Path | None = None


@dataclass
class RunFolder:
    """The folder of a run.

    Attributes:
        path: Absolute.
    """

    path: Path
    _seen: tuple[int, int] | None = field(default=None, repr=False)

    @property
    def script(self) -> Path:
        """What sbatch is given."""
        return self.path / "job.sh"

    @property
    def output(self) -> Path:
        """What the script prints."""
        return self.path / "job.out"

    @property
    def logs(self) -> Path:
        """Output of the nodes."""
        return self.path / "logs"

    # What is submitted

    def write_submission(self, files: Mapping[str, bytes]) -> None:
        """Makes the folder, with these files in it.

        Raises:
            LaunchError: It cannot be made, others could replace it, or another run is in it.
        """
        try:
            make_folder(self.path)
            self.path.chmod(0o700)
            check_own_folder(self.path.resolve())
            # First, so that of two launches with one folder one is refused.
            (self.path / "run").mkdir(mode=0o700)
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
        """Takes the run back, which did not begin: another one may have the folder."""
        shutil.rmtree(self.path / "run", ignore_errors=True)

    def refresh(self) -> None:
        """Makes a network drive look for what is new."""
        with contextlib.suppress(OSError):
            list((self.path / "run").iterdir())

    def check_owner(self) -> None:
        """Refuses a folder that is not the user's own: what is in it is unpickled.

        Raises:
            LaunchError: There is no run in it, or others may write there.
        """
        try:
            check_own_folder(self.path.resolve())
            read_private(self.path / "order.pickle")
        except OSError as error:
            raise LaunchError(f"no run of a Slurm job is read in {self.path}: {error}") from error

    def read_order(self) -> JobOrder:
        """Returns what the job is to run."""
        order: JobOrder = pickle.loads(read_private(self.path / "order.pickle"))
        return order

    def read_work(self) -> LaunchPlan:
        """Returns the plan with its work; the user's code is importable by now."""
        works = pickle.loads(read_private(self.path / "work.pickle"))
        return self.read_order().plan.with_works(works)

    # What the job writes, and the launcher reads

    def clear(self) -> None:
        """Removes what an earlier run of the job has written; called when it starts again."""
        self._state("job").parent.mkdir(mode=0o700, exist_ok=True)
        for name in ("addresses", "status", "result", "failure", "stop"):
            self._state(name).unlink(missing_ok=True)
        self.write("job", os.environ["SLURM_JOB_ID"].encode())
        self.write("begun", b"")

    def _state(self, name: str) -> Path:
        return self.path / "run" / name

    def write(self, name: str, content: bytes) -> None:
        """Writes a file of the run's state."""
        write_private(self._state(name), content)

    def read(self, name: str) -> bytes | None:
        """Returns a file of the run's state; None if it is not there."""
        with contextlib.suppress(OSError):
            return self._state(name).read_bytes()
        return None

    def stamp(self, name: str) -> int | None:
        """Returns when a file of the run's state was written, by whatever clock; None: not yet."""
        with contextlib.suppress(OSError):
            return self._state(name).stat().st_mtime_ns
        return None

    def write_end(self, end: End) -> None:
        """Writes how the program ended."""
        self.write("result", json.dumps(to_json(end)).encode())

    def read_end(self) -> End | None:
        """Returns how the program ended; None if it has not."""
        data = self.read("result")
        if data is None:
            return None
        end: End = from_json(End, json.loads(data))
        return end

    def write_status(self, status: list[NodeStatus]) -> None:
        """Writes how each node is."""
        self.write("status", json.dumps(to_json(status)).encode())

    def read_status(self) -> list[NodeStatus]:
        """Returns how each node is; none before they start."""
        return [*from_json(tuple[NodeStatus, ...], json.loads(self.read("status") or b"[]"))]

    def ask_for_stacks(self, question: str) -> None:
        """Asks where the threads of nodes are.

        Args:
            question: A word that no other question has.
        """
        self.write("look", question.encode())

    def write_stacks(self, look: Callable[[], Mapping[str, str]]) -> None:
        """Writes where the threads of nodes are, if that was asked and is not answered yet."""
        question = (self.read("look") or b"").decode()
        if question and self.read_stacks(question) is None:
            self.write("stacks", json.dumps({question: dict(look())}).encode())

    def read_stacks(self, question: str) -> Mapping[str, str] | None:
        """Returns the answer to a question; None: not yet."""
        answers: Mapping[str, Mapping[str, str]] = json.loads(self.read("stacks") or b"{}")
        return answers.get(question)

    def write_addresses(self, table: AddressTable) -> None:
        """Writes where nodes listen, and what it takes to talk to them."""
        tls = table.tls
        content = {
            "endpoints": dict(table.endpoints),
            "secret": table.secret.reveal(),
            "tls": tls
            and {"certificate": tls.certificate, "key": tls.key, "authority": tls.authority},
        }
        self.write("addresses", pickle.dumps(content))

    def read_new_addresses(self) -> AddressTable | None:
        """Returns where nodes listen, if that is known and was not returned before."""
        try:
            with self._state("addresses").open("rb") as file:
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_mtime_ns)
                if seen == self._seen:
                    return None
                content: dict[str, Any] = pickle.load(file)
        except OSError:
            return None
        self._seen = seen
        tls = content["tls"] and TlsCredentials(**content["tls"])
        return AddressTable(content["endpoints"], Secret(content["secret"]), tls)

    def write_stop(self, reason: str, signum: int | None) -> None:
        """Leaves word why the program is to end."""
        self.write("stop", json.dumps({"reason": reason, "signum": signum}).encode())

    def read_stop(self) -> tuple[str, int | None]:
        """Returns why the program is to end."""
        found = json.loads(self.read("stop") or b"{}")
        return found.get("reason", "SIGINT"), found.get("signum")


def submission_files(
    script: str, order: JobOrder, plan: LaunchPlan, shipment: Shipment
) -> dict[str, bytes]:
    """Returns all files of a submission by their names.

    Args:
        script: For sbatch.
        order: What is to run.
        plan: With the work.
        shipment: The code.

    Raises:
        LaunchError: Code cannot be read.
    """
    begin = {
        "python": sys.version_info[:2],
        "trees": [tree.key for tree in shipment.trees],
        "cache": order.cache,
    }
    return {
        "job.sh": script.encode(),
        "begin.py": (Path(boot.__file__).read_text() + _BEGIN).encode(),
        "order.json": json.dumps(begin, indent=2).encode(),
        "order.pickle": dumps(order),
        "work.pickle": dumps(plan.works),
        **{f"code/{tree.key}.tar.gz": tree.archive() for tree in shipment.trees},
    }
