"""What the supervisor in the cluster is to do, on its way there: Secrets, and one blob of work.

The blob holds the work of the nodes and their code, so it may be large; it lies in Secrets, on a
volume, or where a URL leads. The order beside it, always in a Secret, has its digest: nothing of the
blob is looked at before that agrees.
"""

import contextlib
import hashlib
import http
import http.client
import io
import json
import os
import pickle
import secrets
import signal
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from courier import TlsCredentials
from courier._parcel import dumps
from launchers._elsewhere import Order
from launchers._kubernetes.agreed import MOUNTS
from launchers._kubernetes.names import Names
from launchers._kubernetes.pods import Volume
from launchers._shipping import Shipment
from launchers._trust import Authority
from launchers.host import boot, pod
from launchers.host.arrival import LOADER
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
#: Put before what a pod runs first. As process 1 it would ignore signals without a handler, until the end of
#: its notice; and imports take a while.
_HEAR = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit({code}))\n"
#: Put behind the text of `launchers.host.boot`, whose cache of code it uses: all that runs before
#: our packages are there.
_BEGIN = '''

def fetch(source):
    """Returns the blob from where it lies."""
    if source["url"]:
        import urllib.request
        with urllib.request.urlopen(source["url"], timeout=300) as answer:
            return answer.read()
    if source["file"]:
        with open(source["file"], "rb") as file:
            return file.read()
    parts = sorted(name for name in os.listdir(source["parts"]) if name.startswith("part-"))
    blob = b""
    for name in parts:
        with open(os.path.join(source["parts"], name), "rb") as file:
            blob += file.read()
    return blob


def begin(folder):
    """Makes the code of the program importable, and becomes its supervisor."""
    with open(os.path.join(folder, "order.json")) as file:
        order = json.load(file)
    if list(sys.version_info[:2]) != order["python"]:
        sys.exit(
            "the image of the supervisor has Python %d.%d, the program was launched by %d.%d: use an "
            "image with that, or launch with the Python of the image"
            % (tuple(sys.version_info[:2]) + tuple(order["python"]))
        )
    blob = fetch(order["source"])
    if hashlib.sha256(blob).hexdigest() != order["digest"]:
        sys.exit("the work of the program is not what was launched: its digest differs")
    os.makedirs(order["room"], mode=0o700, exist_ok=True)
    members = {}
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        for member in tar:
            members[member.name] = tar.extractfile(member).read()
    cache = _Cache(order["room"])
    for key in order["trees"]:
        if not cache.has_tree(key):
            cache.add_tree(key, members["code/" + key])
    trees = [cache.tree(key) for key in order["trees"]]
    sys.path[:1] = trees
    try:
        from launchers._kubernetes.supervise import main as supervise
    except ImportError as error:
        sys.exit(
            "%s in the image of the supervisor: it needs launchpad-lite and all that the program "
            "imports; install it there, or name another image" % error
        )
    sys.exit(supervise(folder, members, trees))


begin(os.path.dirname(os.path.abspath(__file__)))
'''


@dataclass(frozen=True)
class WorkVolume:
    """A volume that this machine sees, too: for work that is too large for Secrets.

    Each launch, and each `emit`, writes a file of its own there, in a folder with the name of the
    run. The launching process removes it when the program has ended. That of a run which is
    detached, and of emitted objects, stays.

    Attributes:
        folder: Where it is mounted here, or a folder in it.
        volume: What Kubernetes mounts, like `{"persistentVolumeClaim": {"claimName": "shared"}}`.
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
            # It is not shown: who reads one that is signed may write there.
            raise ValueError("put= of WorkStore is a URL that begins with http:// or https://")


WorkPlace = WorkVolume | WorkStore


@dataclass(frozen=True, kw_only=True)
class PodOrder(Order):
    """What a supervisor in a pod is to run.

    Attributes:
        hosts: Host name of each node's pod.
        names: By which each host is called, by its host name.
        ports: Where nodes listen, by address key.
        schedule_s: Seconds within which pods must have come; infinity: as long as it takes.
        launcher_silence_s: Seconds after which a launching process that says nothing is gone.
        begins_anew: Whether Kubernetes starts the supervisor again that it has ended.
    """

    hosts: Mapping[str, str]
    names: Mapping[str, str]
    ports: Mapping[str, int]
    schedule_s: float
    launcher_silence_s: float
    begins_anew: bool


@dataclass(frozen=True)
class Packed:
    """All files of a run.

    Attributes:
        trust: For all pods: how they prove themselves, and what they do first.
        order: For the supervisor.
        blob: Its work.
        file: Name of the blob on a volume, which nothing else there has.
        key: For the seal of its last record.
    """

    trust: Mapping[str, bytes]
    order: Mapping[str, bytes]
    blob: bytes
    file: str
    key: bytes


def pack(
    order: PodOrder, plan: LaunchPlan, shipment: Shipment, names: Names, place: WorkPlace | None
) -> Packed:
    """Returns all files of a run.

    Args:
        order: What is to be run.
        plan: With the work.
        shipment: The code.
        names: What everything is called.
        place: Where the blob is going to be; None: in Secrets.

    Raises:
        LaunchError: Code cannot be read, or there is too much of it for Secrets.
        MissingExtraError: The package for certificates is not installed.
    """
    key = secrets.token_bytes(_KEY_BYTES)
    file = f"work-{secrets.token_hex(6)}.tar"
    blob = _tar(
        {
            "order.pickle": dumps(order),
            "work.pickle": dumps(plan.works),
            **{f"code/{tree.key}": tree.archive() for tree in shipment.trees},
        }
    )
    if place is None and len(blob) > MOST_IN_SECRETS:
        raise LaunchError(
            f"the work and code of the nodes are {len(blob) / 1e6:.0f} MB, and Secrets hold at most "
            f"{MOST_IN_SECRETS / 1e6:.0f} MB. Have nodes read large data where they run, or say where "
            "else to put it: work=WorkVolume(...), a volume that this machine sees, too, or "
            "work=WorkStore(...), an object store"
        )
    begin = {
        "python": sys.version_info[:2],
        "trees": [tree.key for tree in shipment.trees],
        "digest": hashlib.sha256(blob).hexdigest(),
        "room": _ROOM,
        "source": {
            "parts": WORK_MOUNT,
            "file": _mounted(place, names.run, file) if isinstance(place, WorkVolume) else "",
            "url": place.get if isinstance(place, WorkStore) else "",
        },
    }
    return Packed(
        trust=_trust(plan.program, names),
        order={
            "begin.py": _first(boot.__file__, _BEGIN, 128 + signal.SIGTERM),
            "order.json": json.dumps(begin, indent=2).encode(),
            "key": key,
        },
        blob=blob,
        file=file,
        key=key,
    )


def _mounted(place: WorkVolume, run: str, file: str) -> str:
    return "/".join(part for part in (WORK_MOUNT, place.path.strip("/"), run, file) if part)


def _trust(program: str, names: Names) -> dict[str, bytes]:
    # One certificate for all: each of them may call, and be called by, each other.
    services = [names.supervisor, *(f"*.{service}" for service in names.groups.values())]
    tls = Authority(program).issue(names.run, services)
    return {
        "authority.pem": tls.authority,
        "certificate.pem": tls.certificate,
        "key.pem": tls.key,
        "pod.py": _first(pod.__file__, f"\n\nmain({LOADER!r})\n", pod.MAY_COME_BACK),
    }


def _first(module: str, rest: str, code: int) -> bytes:
    """Returns what a pod runs first: the text of a module, and more, that ends with a code if told to."""
    return (_HEAR.format(code=int(code)) + Path(module).read_text() + rest).encode()


def put(packed: Packed, place: WorkPlace, run: str) -> None:
    """Puts the blob where the supervisor finds it. On a volume, nothing is left of it if that fails.

    Args:
        packed: With the blob.
        place: Where.
        run: Name of the run.

    Raises:
        LaunchError: It cannot be put there.
    """
    if isinstance(place, WorkStore):
        _send(packed.blob, place.put)
        return
    try:
        _write(packed.blob, Path(place.folder) / run, packed.file)
    except BaseException as error:  # an interrupt, too
        left = take_back(packed, place, run)
        if isinstance(error, OSError):
            raise LaunchError(f"the work cannot be written to its volume: {error}{left}") from error
        raise


def _write(blob: bytes, folder: Path, file: str) -> None:
    is_new = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(blob)
    # The user of the pod is another one. It holds no secrets of the run; work may be private.
    (folder / file).chmod(0o644)
    if is_new:
        folder.chmod(0o755)


def _send(blob: bytes, url: str) -> None:
    try:
        request = urllib.request.Request(url, data=blob, method="PUT")  # noqa: S310 - the user's own
        request.add_header("Content-Type", "application/octet-stream")
        with urllib.request.urlopen(request, timeout=_TRANSFER_S):  # noqa: S310
            return
    except (OSError, ValueError, http.client.HTTPException) as error:
        what = _without_url(error)
    # Apart from the error, whose text may have the URL: it may be signed, and then who reads it may
    # write there.
    raise LaunchError(f"the work cannot be sent to the object store: {what}")


def _without_url(error: Exception) -> str:
    """Returns what went wrong with a request, and nothing of where it was sent."""
    if isinstance(error, urllib.error.HTTPError):
        known = [each.phrase for each in http.HTTPStatus if each == error.code]
        return f"it answers HTTP {' '.join([str(error.code), *known])}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    if isinstance(error, urllib.error.URLError) or not isinstance(error, OSError):
        return f"{type(error).__name__}; is put= of WorkStore the URL of a server for HTTP?"
    return str(error) or type(error).__name__


def take_back(packed: Packed, place: WorkPlace, run: str) -> str:
    """Removes the blob from its volume; returns what is left of it, for people.

    From an object store, its owner removes it.
    """
    if isinstance(place, WorkStore):
        return ""
    folder = Path(place.folder) / run
    try:
        if os.path.lexists(folder / packed.file):  # what cannot be looked at, was never written
            (folder / packed.file).unlink(missing_ok=True)
    except OSError as error:
        return f"; still there, for you to remove: {folder / packed.file} ({error})"
    # Not empty where runs of the same name, or emitted objects, have left theirs.
    with contextlib.suppress(OSError):
        folder.rmdir()
    return ""


def read_order(members: Mapping[str, bytes]) -> PodOrder:
    """Returns what the supervisor is to run, out of a blob whose digest was checked."""
    order: PodOrder = pickle.loads(members["order.pickle"])
    return order


def read_work(members: Mapping[str, bytes], order: PodOrder) -> LaunchPlan:
    """Returns the plan with its work; the user's code is importable by now."""
    return order.plan.with_works(pickle.loads(members["work.pickle"]))


def read_trust(folder: Path) -> TlsCredentials:
    """Returns the certificates of the run."""
    certificate, key, authority = (
        (folder / name).read_bytes() for name in ("certificate.pem", "key.pem", "authority.pem")
    )
    return TlsCredentials(certificate=certificate, key=key, authority=authority)


def _tar(members: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()
