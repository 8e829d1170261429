"""The handshake before the first frame. Pure: bytes in, bytes out.

    client: magic, version, purpose; the name of the server it means (or zeros), its nonce
    server: length, its nonce, its proof, its introduction
    client: its proof; frames follow

A purpose other than a call is answered at once: a health check takes one byte and no proof. It is 1 if
the server serves, else 0.

    session key    = HMAC-SHA256(secret, "courier.v2 session" | client nonce | server nonce)
    introduction   = JSON with blanks behind it, xor SHAKE-256(session key | "courier.v2 introduction")
    server's proof = HMAC-SHA256(session key, "courier.v2 server" | server's name meant | introduction)
    client's proof = HMAC-SHA256(session key, "courier.v2 client" | introduction)
    seals          = keyed with HMAC-SHA256(session key, "courier.v2 requests" or "... replies")

The magic tells our clients from those of gRPC, which begin with "PRI" or, under TLS, with 0x16. The
proofs cover the introduction, so that an attacker on the path cannot, say, mark a method as
idempotent. Without the secret, the introduction cannot be read, and its length tells little. Where
there is no secret, anybody can compute the session key: then nothing is hidden, and nothing proved.

After `multiprocessing.connection`, made mutual.
"""

import enum
import hashlib
import hmac
import json
import os
import struct
from typing import Any, NamedTuple

from courier.errors import AuthenticationError, ProtocolError
from courier.wire.secret import Secret

VERSION = 5
MAGIC = b"\xc0urier"
PREFIX_BYTES = len(MAGIC) + 2
NAME_BYTES = 16
_NONCE_BYTES = 32
PROOF_BYTES = 32
#: The first message of the client, after the prefix.
HELLO_BYTES = NAME_BYTES + _NONCE_BYTES
NO_NAME = bytes(NAME_BYTES)
LENGTH = struct.Struct("<I")
#: In place of the length: the server speaks under TLS only.
TLS_WANTED = 0xFFFF_FFFF
#: The first bytes of HTTP/2, and so of gRPC.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: An introduction lists methods; a mebibyte is more than enough.
MAX_WELCOME_BYTES = 1 << 20
#: The lengths of introductions are multiples of this; most have just this length.
_BLOCK_BYTES = 512


# OpenSSL initialises itself, under a lock, at its first use. A fork in another thread at that
# moment would block it in the child; so use it now.
hmac.digest(b"", b"", "sha256")


class Purpose(enum.IntEnum):
    """Why a client connects."""

    CALLS = 0
    HEALTH = 1


class Introduction(NamedTuple):
    """The introduction of a server. Fields are empty where it has nothing to say."""

    #: Of this server in this process, in hex: random, so that no two share one.
    name: str
    #: Identifies the running kernel; the same for all on one machine.
    host: str = ""
    #: Name of the unix socket of the same server.
    local: str = ""
    #: Methods that a client may send again if it does not know whether they ran.
    idempotent: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    #: Why the server refuses the connection.
    refusal: str = ""

    def encode(self) -> bytes:
        """Returns it as bytes, padded with blanks, because anybody can see the length."""
        data = json.dumps(self._asdict()).encode()
        return data + b" " * (-len(data) % _BLOCK_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> "Introduction":
        try:
            fields: dict[str, Any] = json.loads(data)
            lists = {key: tuple(fields.get(key, ())) for key in ("idempotent", "methods")}
            made = cls(**{**fields, **lists})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError("the server's introduction cannot be read") from error
        names = (*made.idempotent, *made.methods)
        texts = (made.name, made.host, made.local, made.refusal, *names)
        if not all(isinstance(text, str) for text in texts):
            raise ProtocolError("the server's introduction cannot be read")
        return made


class SessionKeys(NamedTuple):
    """Keys that both sides derive from the secret and their nonces."""

    requests: bytes
    replies: bytes


class ClientHandshake:
    """The client's half."""

    def __init__(self, secret: Secret | None, server: bytes = NO_NAME) -> None:
        """Begins a handshake with the server of this name; zeros for any."""
        self._secret = secret
        self._server = server
        self._nonce = os.urandom(_NONCE_BYTES)

    def hello(self) -> bytes:
        return self._server + self._nonce

    def prove(self, welcome: bytes) -> tuple[bytes, Introduction, SessionKeys]:
        """Checks the server's welcome, after the length; returns the client's proof."""
        nonce, rest = welcome[:_NONCE_BYTES], welcome[_NONCE_BYTES:]
        proof, veiled = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
        if len(proof) < PROOF_BYTES:
            raise ProtocolError("the server's welcome is too short")
        key = _session_key(self._secret, self._nonce, nonce)
        if not hmac.compare_digest(_mac(key, b"server", self._server + veiled), proof):
            raise AuthenticationError(
                "the server does not hold the secret of this client; both must come from the same "
                "program"
            )
        introduction = Introduction.decode(_veil(key, veiled))
        return _mac(key, b"client", veiled), introduction, _keys(key)


class ServerHandshake:
    """The server's half."""

    def __init__(self, secret: Secret | None, introduction: Introduction) -> None:
        self._secret = secret
        self._introduction = introduction
        # No proof is right before the welcome.
        self._expected = os.urandom(PROOF_BYTES)
        self._key = b""

    def welcome(self, hello: bytes) -> bytes:
        meant, client_nonce = hello[:NAME_BYTES], hello[NAME_BYTES:]
        introduction = self._introduction
        if meant not in (NO_NAME, bytes.fromhex(introduction.name)):
            introduction = Introduction(introduction.name, refusal="another server was meant")
        nonce = os.urandom(_NONCE_BYTES)
        self._key = _session_key(self._secret, client_nonce, nonce)
        veiled = _veil(self._key, introduction.encode())
        self._expected = _mac(self._key, b"client", veiled)
        body = nonce + _mac(self._key, b"server", meant + veiled) + veiled
        return LENGTH.pack(len(body)) + body

    def check(self, proof: bytes) -> SessionKeys:
        if not hmac.compare_digest(self._expected, proof):
            raise AuthenticationError("the client does not hold the secret")
        return _keys(self._key)


def prefix(purpose: Purpose) -> bytes:
    return MAGIC + bytes((VERSION, purpose))


def read_prefix(data: bytes) -> Purpose:
    """Reads the first bytes of a connection; ProtocolError for other protocols or versions."""
    if not data.startswith(MAGIC) or len(data) != PREFIX_BYTES:
        raise ProtocolError("not a courier client")
    version, purpose = data[len(MAGIC) :]
    if version != VERSION:
        raise ProtocolError(f"version {version} of the protocol; this server speaks {VERSION}")
    try:
        return Purpose(purpose)
    except ValueError as error:
        raise ProtocolError("connected for an unknown purpose") from error


def _session_key(secret: Secret | None, client_nonce: bytes, server_nonce: bytes) -> bytes:
    key = secret.reveal() if secret is not None else b""
    return _mac(key, b"session", client_nonce + server_nonce)


def _mac(key: bytes, purpose: bytes, content: bytes = b"") -> bytes:
    return hmac.digest(key, b"courier.v2 " + purpose + content, "sha256")


def _veil(key: bytes, introduction: bytes) -> bytes:
    """Encrypts or decrypts an introduction; a key, made of two nonces, is used once."""
    count = len(introduction)
    stream = hashlib.shake_256(key + b"courier.v2 introduction").digest(count)
    mixed = int.from_bytes(introduction, "little") ^ int.from_bytes(stream, "little")
    return mixed.to_bytes(count, "little")


def _keys(key: bytes) -> SessionKeys:
    return SessionKeys(_mac(key, b"requests"), _mac(key, b"replies"))
