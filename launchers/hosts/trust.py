"""The certificate authority of one run of a program. It lives in memory and ends with the run.

A program that spans machines accepts only peers with a certificate of its own authority (see
`courier.TlsCredentials`). The launcher is that authority. Nothing here is written to disk, and the
authority's key never leaves the process.
"""

import contextlib
import datetime as dt
import ipaddress
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import courier
from launchpad_lite.errors import MissingExtraError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

#: Certificates are always valid, so that hosts whose clocks are wrong accept them, and no run outlasts them. Limits
#: would protect nothing: no server trusts the authority before or after the run. The end is "no
#: well-defined expiration date" (RFC 5280, section 4.1.2.5).
_BEGIN = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_END = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.timezone.utc)
#: Longest common name, in characters (RFC 5280, appendix A.1).
_MAX_NAME = 64
#: Names by which a node is reached on its own host.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Authority:
    """Issues credentials that trust only each other. Thread-safe.

    Its keys use the curve P-256, which every TLS 1.3 library supports. Each run has its own, so
    credentials of one run are worthless in the next.
    """

    def __init__(self, program: str) -> None:
        """Makes a new authority. The name of the program is for people who read certificates."""
        try:
            self._key, self._certificate = _certify(f"launchpad {program}", (), None)
        except ImportError as error:
            raise MissingExtraError(
                "certificates for a program on several hosts need the package 'cryptography', on "
                "the machine that launches. Run: pip install 'launchpad-lite[ssh]' (or [kubernetes])"
            ) from error

    def issue(self, name: str, addresses: Sequence[str] = ()) -> courier.TlsCredentials:
        """Returns new credentials, for servers and for clients.

        Our own clients accept any certificate of the authority. gRPC clients require that it holds
        the DNS name or IP address by which they reach the server, without port; `*.name` stands for
        all directly below a name, and those of loopback are always there.
        """
        from cryptography.hazmat.primitives import serialization

        signer = self._key, self._certificate
        key, certificate = _certify(name, dict.fromkeys((*addresses, *_LOOPBACK)), signer)
        pem = serialization.Encoding.PEM
        return courier.TlsCredentials(
            certificate=certificate.public_bytes(pem),
            key=key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            authority=self._certificate.public_bytes(pem),
        )


#: A key and its certificate.
_Signer = tuple["ec.EllipticCurvePrivateKey", "x509.Certificate"]


def _certify(name: str, addresses: Iterable[str], signer: _Signer | None) -> _Signer:
    """Returns a new key and its certificate: an authority's own if `signer` is None, else one that it signs."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    short = name.encode()[:_MAX_NAME].decode(errors="ignore")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, short)])
    usage = x509.KeyUsage(
        digital_signature=signer is not None,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signer is None,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(
        ca=signer is None, path_length=0 if signer is None else None
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer[1].subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    if signer is None:
        return key, builder.sign(key, hashes.SHA256())
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = x509.SubjectAlternativeName(map(_alternative, addresses))
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer[0].public_key())
    builder = (
        builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(names, critical=False)
        .add_extension(issuer, critical=False)
    )
    return key, builder.sign(signer[0], hashes.SHA256())


def _alternative(address: str) -> "x509.GeneralName":
    from cryptography import x509

    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(address))
    return x509.DNSName(address)
