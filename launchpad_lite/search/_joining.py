"""How Python workers from outside of the program join a running search."""

import json
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import courier
from launchpad_lite.parts.private_files import make_folder, read_private, write_private
from launchpad_lite.search._messages import Life, member_here
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import SearchError
from launchpad_lite.search.worker import Worker

#: The file in the folder of a search with all that a worker needs to join.
JOIN_FILE = "join.json"
#: What certificates consist of, as texts.
_PEMS = ("certificate", "key", "authority")
#: Seconds that the name server has to answer the first call.
_ANSWER_S = 20.0


@dataclass(frozen=True)
class JoinInfo:
    """The credentials with which a worker joins a search: at the address of its name server."""

    address: str
    secret: courier.Secret | None = field(default=None, repr=False)
    tls: courier.TlsCredentials | None = field(default=None, repr=False)

    @classmethod
    def read(cls, path: Path) -> "JoinInfo":
        try:
            fields = json.loads(read_private(path))  # the server at this address sends pickles
            secret, tls = fields["secret"], fields["tls"]
            if tls:
                tls = courier.TlsCredentials(**{name: tls[name].encode() for name in _PEMS})
            secret = courier.Secret(bytes.fromhex(secret)) if secret else None
            return cls(fields["address"], secret, tls or None)
        except OSError as error:
            raise SearchError(
                f"cannot read {path}: {error.strerror or error}; a search writes {JOIN_FILE} into its folder "
                "while it runs"
            ) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SearchError(f"{path} is no {JOIN_FILE} of a search: {error!r}") from error

    def write(self, folder: Path) -> Path:
        """Writes it to a file that no other user can read, at once; returns its path."""
        tls = self.tls and {name: getattr(self.tls, name).decode() for name in _PEMS}
        secret = self.secret and self.secret.reveal().hex()
        text = json.dumps({"address": self.address, "secret": secret, "tls": tls}, indent=1)
        make_folder(folder)
        path = folder / JOIN_FILE
        write_private(path, f"{text}\n".encode())
        return path

    def connect(self, address: str = "", **options: Any) -> Any:
        """Returns a client of a part of the search; by default of the name server."""
        return courier.Client(address or self.address, secret=self.secret, tls=self.tls, **options)


def outside_worker(info: JoinInfo, name: str, stop: threading.Event) -> Worker:
    """Returns a worker that belongs to no program; once `stop` is set, it ends after its task."""
    timing = timing_of(info)
    member = member_here("worker", Life(name, uuid.uuid4().hex))
    return Worker(Presence(member, info.connect(), {}, info.connect, timing), stop)


def timing_of(info: JoinInfo, answer_s: float = _ANSWER_S) -> Timing:
    """Returns the timing of a search, which its name server must tell within `answer_s`."""
    client = info.connect(wait_for_ready=False, call_timeout_s=answer_s)
    where = info.address
    try:
        timing: Timing = client.timing()
    except courier.AuthenticationError as error:
        raise SearchError(
            f"{where} does not take this secret: it is that of another search, or of an earlier start "
            f"of this one ({error})"
        ) from error
    except courier.ServerGoneError as error:
        raise SearchError(
            f"no answer from {where}: the search has ended or is not up yet, or this machine "
            f"does not reach it ({error})"
        ) from error
    except courier.UnknownMethodError as error:
        raise SearchError(f"at {where} is no name server of a search") from error
    except courier.CourierError as error:
        raise SearchError(f"the name server at {where} does not answer: {error}") from error
    finally:
        courier.close(client)
    return timing
