"""Packs what the supervisor in the cluster has to do: files for Secrets, and one blob of work.

The blob may be large. It lies in Secrets, on a volume, or at a URL. The code that loads the blob is
always in a Secret.
"""

import contextlib
import http
import http.client
import os
import secrets
import signal
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from courier import TlsCredentials
from launchers.host import pod
from launchers.hosts import orders
from launchers.hosts.arrival import LOADER
from launchers.hosts.shipping import Shipment
from launchers.hosts.trust import Authority
from launchers.kubernetes._agreed import MOUNTS
from launchers.kubernetes._names import Names
from launchers.kubernetes._pods import Volume
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import LaunchPlan

#: Where the parts of a blob in Secrets, or the volume that it lies on, are mounted.
WORK_MOUNT = f"{MOUNTS}/work"
#: The most work that Secrets hold: each is one object of the cluster's database.
MOST_IN_SECRETS = 16_000_000
#: Folder of a supervisor for all that it unpacks.
_ROOM = "/tmp/launchpad"  # noqa: S108 - of its own pod
_KEY_BYTES = 32
_TRANSFER_S = 300.0
#: The first code of a pod. Process 1 ignores signals without a handler, so a pod that is ended during
#: its imports, which take a while, would go on until the end of its notice.
_HEAR = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit({code}))\n"


@dataclass(frozen=True)
class WorkVolume:
    """A volume that this machine sees, too: for work that is too large for Secrets.

    Each launch, and each `emit`, writes a file of its own there, in a folder with the name of the
    run. The launching process removes the file when the program has ended. The files of detached
    runs and of emitted objects stay.

    Attributes:
        folder: Where it is mounted here, or a folder in it.
        volume: The volume that Kubernetes mounts, like `{"persistentVolumeClaim": {"claimName": "shared"}}`.
        path: That of the folder in the volume; by default its top.

    Raises:
        ValueError: `volume` is no dict with one source.
    """

    folder: str | Path
    volume: Mapping[str, Any]
    path: str = ""

    def __post_init__(self) -> None:
        Volume("/", self.volume)


@dataclass(frozen=True)
class WorkStore:
    """An object store, or any server that takes HTTP PUT and GET: for work too large for Secrets.

    Attributes:
        put: URL to which this process sends it, by HTTP or HTTPS, signed beforehand where that is
            needed.
        get: URL from which the supervisor gets it.

    Raises:
        ValueError: `put` is no such URL.
    """

    put: str = field(repr=False)
    get: str = field(repr=False)

    def __post_init__(self) -> None:
        if not self.put.lower().startswith(("http://", "https://")):
            # The message does not show the URL: a reader of a signed one could write there.
            raise ValueError("put= of WorkStore is a URL that begins with http:// or https://")


WorkPlace = WorkVolume | WorkStore


@dataclass(frozen=True, kw_only=True)
class PodOrder(orders.Order):
    """What a supervisor in a pod is to run. The addresses of its plan have ports."""

    supervisor = "launchers.kubernetes._supervise"
    advice = (
        "in the image of the supervisor: it needs the Python that launches, launchpad-lite, and all that "
        "the program imports; install them there, or name another image"
    )

    names: Names
    schedule_s: float
    silence_s: float
    launcher_silence_s: float

    @property
    def hosts(self) -> dict[str, str]:
        nodes = self.plan.executables
        return {each.name: self.names.host(each.label, each.replica) for each in nodes}

    @property
    def addresses(self) -> dict[str, str]:
        nodes = self.plan.executables
        return {
            self.names.host(each.label, each.replica): self.names.address(each.label, each.replica)
            for each in nodes
        }

    @property
    def begins_anew(self) -> bool:
        """Whether Kubernetes starts the supervisor again after it has ended it."""
        return all(each.restart.outlives_host for each in self.plan.executables)


@dataclass(frozen=True, repr=False)
class PackedRun:
    """All files of a run. They hold secrets.

    Attributes:
        trust: For all pods: certificates, and the code that they run first.
        order: For the supervisor, with the key for the seal of its last record.
        blob: Its work.
        place: Where the blob is going to be; None: in Secrets.
        path: The file of the blob on a volume, as this machine sees it.
    """

    trust: Mapping[str, bytes]
    order: Mapping[str, bytes]
    blob: bytes = b""
    place: WorkPlace | None = None
    path: Path = Path()


def pack(
    order: PodOrder, plan: LaunchPlan, shipment: Shipment, place: WorkPlace | None
) -> PackedRun:
    """Returns all files of a run.

    Raises:
        LaunchError: Code cannot be read, or there is too much of it for Secrets.
        MissingExtraError: The package for certificates is not installed.
    """
    file = f"work-{secrets.token_hex(6)}.pickle"
    path = Path()
    match place:
        case WorkVolume():
            path = Path(place.folder) / order.names.run / file
            parts = (WORK_MOUNT, place.path.strip("/"), order.names.run)
            source: str | tuple[str, str] = ("/".join(filter(None, parts)), file)
        case WorkStore():
            source = place.get
        case None:
            source = (WORK_MOUNT, "part-*")
    files, blob = orders.pack(order, plan, shipment, source, _ROOM)
    if place is None and len(blob) > MOST_IN_SECRETS:
        raise LaunchError(
            f"the work and code of the nodes are {len(blob) / 1e6:.0f} MB, and Secrets hold at most "
            f"{MOST_IN_SECRETS / 1e6:.0f} MB. Have nodes read large data where they run, or say where "
            "else to put it: work=WorkVolume(...), a volume that this machine sees, too, or "
            "work=WorkStore(...), an object store"
        )
    files["begin.py"] = _HEAR.format(code=128 + signal.SIGTERM).encode() + files["begin.py"]
    order_files = {**files, "key": secrets.token_bytes(_KEY_BYTES)}
    return PackedRun(_trust(plan.program, order.names), order_files, blob, place, path)


def _trust(program: str, names: Names) -> dict[str, bytes]:
    # One certificate for all pods, because each pod may call each other one.
    services = [names.run, *(f"*.{service}" for service in names.groups.values())]
    tls = Authority(program).issue(names.run, services)
    hear = _HEAR.format(code=int(pod.MAY_COME_BACK))
    return {
        "authority.pem": tls.authority,
        "certificate.pem": tls.certificate,
        "key.pem": tls.key,
        "pod.py": f"{hear}{Path(pod.__file__).read_text()}\n\nmain({LOADER!r})\n".encode(),
    }


def put(packed: PackedRun) -> None:
    """Puts the blob where the supervisor finds it. If that fails, nothing is left on a volume.

    Raises:
        LaunchError: It cannot be put there.
    """
    if isinstance(packed.place, WorkStore):
        _send(packed.blob, packed.place.put)
    elif packed.place is not None:
        try:
            _write(packed.blob, packed.path)
        except BaseException as error:  # an interrupt, too
            left = take_back(packed)
            if isinstance(error, OSError):
                text = f"the work cannot be written to its volume: {error}{left}"
                raise LaunchError(text) from error
            raise


def _write(blob: bytes, path: Path) -> None:
    is_new = not path.parent.is_dir()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(blob)
    # The pod runs as another user, who must read the file. It holds no secrets of the run, though the
    # work may be private.
    path.chmod(0o644)
    if is_new:
        path.parent.chmod(0o755)


def _send(blob: bytes, url: str) -> None:
    try:
        request = urllib.request.Request(url, data=blob, method="PUT")  # noqa: S310 - the user's own
        request.add_header("Content-Type", "application/octet-stream")
        with urllib.request.urlopen(request, timeout=_TRANSFER_S):  # noqa: S310
            return
    except (OSError, ValueError, http.client.HTTPException) as error:
        what = _without_url(error)
        if isinstance(error, urllib.error.HTTPError):
            error.close()
    # Raised outside of the handler, so that the cause is not shown: its text may have a signed URL,
    # and a reader of that could write there.
    raise LaunchError(f"the work cannot be sent to the object store: {what}")


def _without_url(error: Exception) -> str:
    """Returns what went wrong with a request, without its URL."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers HTTP {error.code}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, OSError):
        return str(reason) or type(reason).__name__
    return f"{type(error).__name__}; is put= of WorkStore the URL of a server for HTTP?"


def take_back(packed: PackedRun) -> str:
    """Removes the blob from its volume; returns what is left of it, for people.

    The owner of an object store removes the blob there.
    """
    if not isinstance(packed.place, WorkVolume):
        return ""
    try:
        if os.path.lexists(packed.path):  # a file that cannot be seen was never written
            packed.path.unlink(missing_ok=True)
    except OSError as error:
        return f"; still there, for you to remove: {packed.path} ({error})"
    # The folder is not empty if another run of the name, or emitted objects, left files in it.
    with contextlib.suppress(OSError):
        packed.path.parent.rmdir()
    return ""


def read_trust(folder: Path) -> TlsCredentials:
    names = ("certificate", "key", "authority")
    return TlsCredentials(**{name: (folder / f"{name}.pem").read_bytes() for name in names})
