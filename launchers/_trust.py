"""The certificate authority of one run of a program. It lives in memory and ends with the run.

Who may talk to a program that spans machines is decided by certificates of its own authority (see
`courier.TlsCredentials`). The launcher is that authority: it issues credentials for each host and
sends them there. Nothing here is written to disk, and the authority's key never leaves the process.
"""

import datetime as dt
import ipaddress
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import courier
from launchpad_lite.errors import MissingExtraError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

#: Hosts whose clocks are behind, or set to local time, must take a new certificate for valid.
_BEFORE = dt.timedelta(days=1)
#: "No well-defined expiration date" (RFC 5280, section 4.1.2.5). A certificate is looked at when a
#: connection begins, so it must outlast every run, and nodes that restart in it. To end it earlier
#: would protect nothing: no server trusts the authority once the run is over.
_END = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.timezone.utc)
#: Of a common name, in characters (RFC 5280, appendix A.1).
_MAX_NAME = 64
#: Where a node is reached on its own host, whatever else it is called.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
#: Underscores are no part of host names, and yet used for them.
_DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def refuse_clock(host: str, there_s: float, here_s: float) -> str | None:
    """Returns what is wrong with the clock of a host that would not trust a certificate made here.

    Args:
        host: Its name.
        there_s: What time it is there, in seconds since 1970.
        here_s: What time it is here, then.
    """
    if here_s - there_s < _BEFORE.total_seconds():
        return None  # one that is ahead takes all, as they do not end
    there, here = (
        dt.datetime.fromtimestamp(each_s, dt.timezone.utc) for each_s in (there_s, here_s)
    )
    return (
        f"{host}: its clock says {there:%Y-%m-%d %H:%M} UTC, and that of the launcher "
        f"{here:%Y-%m-%d %H:%M}: it would take certificates of this run for not valid yet. "
        "Set the clock that is wrong"
    )


class Authority:
    """Issues credentials that trust only each other. Thread-safe.

    Its keys are of the curve P-256, which every TLS 1.3 speaks. Two authorities have nothing in
    common, not even those of one program: what was issued for a run is worthless in the next one.

    Example:
        authority = Authority("actor_learner")
        tls = authority.issue("host-1", ["host-1.cluster", "10.0.0.7"])
    """

    def __init__(self, program: str) -> None:
        """Makes a new authority.

        Args:
            program: Its name, for people who look at certificates.

        Raises:
            MissingExtraError: The package `cryptography` is not installed.
        """
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import hashes
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError as error:
            raise MissingExtraError(
                "certificates for a program on several hosts need the package 'cryptography', on "
                "the machine that launches. Run: pip install 'launchpad-lite[ssh]' (or [kubernetes])"
            ) from error
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = self._key.public_key()
        self._subject = _name(f"launchpad {program}")
        self._certificate = (
            _builder(self._subject, self._subject, public)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str, addresses: Sequence[str] = ()) -> courier.TlsCredentials:
        """Returns new credentials, for servers and for clients.

        Our own clients take any certificate of the authority. gRPC clients want the server's to
        bear the name or number by which they reach it.

        Args:
            name: Whom they are for, for people who look at certificates.
            addresses: DNS names and IP addresses by which servers that use them are reached,
                without ports; `*.name` for all directly below a name. `localhost`, `127.0.0.1` and
                `::1` are always among them.

        Raises:
            ValueError: An address can be neither a DNS name nor an IP address.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        names = [_alternative(address) for address in dict.fromkeys((*addresses, *_LOOPBACK))]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        public = key.public_key()
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(_name(name), self._subject, public)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        return courier.TlsCredentials(
            certificate=certificate.public_bytes(pem),
            key=key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            authority=self._certificate.public_bytes(pem),
        )


def _builder(
    subject: "x509.Name", issuer: "x509.Name", key: "ec.EllipticCurvePublicKey"
) -> "x509.CertificateBuilder":
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime.now(dt.timezone.utc) - _BEFORE)
        .not_valid_after(_END)
    )


def _name(text: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    short = text.encode()[:_MAX_NAME].decode(errors="ignore")
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, short)])


def _key_usage(*, signs_certificates: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(address: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        pass
    if not _DNS_NAME.fullmatch(address):
        raise ValueError(
            f"{address!r} is neither a DNS name in ASCII nor an IP address; give hosts without ports"
        )
    return x509.DNSName(address)
