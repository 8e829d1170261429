"""An authority of a test's own, and certificates of it, made by the openssl program."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import courier

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
_LOOPBACK = ("IP:127.0.0.1", "DNS:localhost")


class Authority:
    """Issues certificates; skips the test where there is no openssl, except in CI."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        if shutil.which("openssl") is None:
            assert os.environ.get("CI") != "true", "CI makes certificates: install openssl"
            pytest.skip("openssl is not on the PATH")
        self._folder = folder / name
        self._folder.mkdir()
        self._numbers = itertools.count(1)
        _openssl(
            self._folder,
            *("req", "-x509", *_NEW_KEY, "-nodes", "-subj", f"/CN={name}", "-days", "2"),
            *("-keyout", "authority.key", "-out", "authority.pem"),
        )
        self.certificate = (self._folder / "authority.pem").read_bytes()

    def pems(
        self, *, names: Sequence[str] = _LOOPBACK, days: int = 2, pass_phrase: str | None = None
    ) -> tuple[bytes, bytes]:
        """Returns a new certificate and its key; of days below 0 one that has expired."""
        stem = f"node-{next(self._numbers)}"
        protection = ("-passout", f"pass:{pass_phrase}") if pass_phrase else ("-nodes",)
        alternatives = ("-addext", f"subjectAltName={','.join(names)}") if names else ()
        _openssl(
            self._folder,
            *("req", *_NEW_KEY, *protection, "-subj", f"/CN={stem}", *alternatives),
            *("-keyout", f"{stem}.key", "-out", f"{stem}.csr"),
        )
        extensions = self._folder / f"{stem}.ext"
        extensions.write_text(f"subjectAltName={','.join(names)}\n" if names else "")
        _openssl(
            self._folder,
            *("x509", "-req", "-in", f"{stem}.csr", "-out", f"{stem}.pem", "-days", str(days)),
            *("-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial"),
            *("-extfile", extensions.name),
        )
        folder = self._folder
        return (folder / f"{stem}.pem").read_bytes(), (folder / f"{stem}.key").read_bytes()

    def issue(self, *, names: Sequence[str] = _LOOPBACK, days: int = 2) -> courier.TlsCredentials:
        """Returns new credentials."""
        certificate, key = self.pems(names=names, days=days)
        return courier.TlsCredentials(certificate=certificate, key=key, authority=self.certificate)


def _openssl(folder: Path, *command: str) -> None:
    done = subprocess.run(
        ["openssl", *command], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
