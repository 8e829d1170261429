"""The file with which processes from outside join a running program."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import courier
from launchpad_lite.parts.private_files import make_folder, read_private, write_private

#: Its name.
JOIN_FILE = "join.json"
#: What certificates consist of, as texts.
_PEMS = ("certificate", "key", "authority")


@dataclass(frozen=True)
class JoinInfo:
    """The credentials with which a process joins, at the address of the server that it calls first."""

    address: str
    secret: courier.Secret | None = field(default=None, repr=False)
    tls: courier.TlsCredentials | None = field(default=None, repr=False)

    @classmethod
    def read(cls, path: Path, what: str, error_type: type[Exception]) -> "JoinInfo":
        """Reads what is to be joined, such as "a search"; raises errors of a type."""
        try:
            fields = json.loads(read_private(path))  # the server at this address sends pickles
            secret, tls = fields["secret"], fields["tls"]
            if tls:
                tls = courier.TlsCredentials(**{name: tls[name].encode() for name in _PEMS})
            secret = courier.Secret(bytes.fromhex(secret)) if secret else None
            return cls(fields["address"], secret, tls or None)
        except OSError as error:
            raise error_type(
                f"cannot read {path}: {error.strerror or error}; {what} writes {JOIN_FILE} into its folder "
                "while it runs"
            ) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise error_type(f"{path} is no {JOIN_FILE} of {what}: {error!r}") from error

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
        """Returns a client, by default of the server that is called first."""
        return courier.Client(address or self.address, secret=self.secret, tls=self.tls, **options)
