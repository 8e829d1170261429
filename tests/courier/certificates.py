"""An authority of a test's own, and certificates of it."""

import datetime as dt
import ipaddress
import itertools
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import courier

_LOOPBACK = ("127.0.0.1", "localhost")
_PEM = serialization.Encoding.PEM


class Authority:
    """Issues certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._numbers = itertools.count(1)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        itself = x509.BasicConstraints(ca=True, path_length=None)
        certificate = self._certify(self._key, self._name, 2, (itself, True))
        self.certificate = certificate.public_bytes(_PEM)

    def pems(
        self, *, names: Sequence[str] = _LOOPBACK, days: int = 2, pass_phrase: str | None = None
    ) -> tuple[bytes, bytes]:
        """Returns a new certificate and its key; of days below 0 one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName(map(_alternative, names))
        certificate = self._certify(
            key,
            _common_name(f"node-{next(self._numbers)}"),
            days,
            *([(alternatives, False)] if names else []),
        )
        protection: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if pass_phrase:
            protection = serialization.BestAvailableEncryption(pass_phrase.encode())
        text = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, protection)
        return certificate.public_bytes(_PEM), text

    def issue(self, *, names: Sequence[str] = _LOOPBACK, days: int = 2) -> courier.TlsCredentials:
        """Returns new credentials."""
        certificate, key = self.pems(names=names, days=days)
        return courier.TlsCredentials(certificate=certificate, key=key, authority=self.certificate)

    def _certify(
        self,
        key: ec.EllipticCurvePrivateKey,
        subject: x509.Name,
        days: int,
        *extensions: tuple[x509.ExtensionType, bool],
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=9))
            .not_valid_after(now + dt.timedelta(days=days))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self._key, hashes.SHA256())


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
