import concurrent.futures
import contextlib
import gc
import os
import pickle
import pty
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

import courier
from tests.courier.by_hand import OPENING, Visitor, relay
from tests.courier.certificates import Authority
from tests.courier.conftest import Meet, Script, Serve, go_by
from tests.courier.grpc_client import GrpcClient, refused
from tests.courier.served import Node
from tests.courier.waiting import wait_until

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def foreign_authority() -> Authority:
    return Authority("foreign")


@pytest.fixture(scope="module")
def tls(authority: Authority) -> courier.TlsCredentials:
    return authority.issue()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    go_by("tcp", monkeypatch)


@pytest.fixture(params=["unix", "tcp", "grpc"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which way clients connect."""
    go_by(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def serve_tls(serve: Serve, tls: courier.TlsCredentials) -> Serve:
    def start(obj: object, *, client: dict[str, Any] | None = None, **options: Any) -> Any:
        client = {"tls": tls, "call_timeout": 60, **(client or {})}
        return serve(obj, **{"tls": tls, **options}, client=client)

    return start


def _peer() -> str:
    return courier.current_call().peer


def test_calls_of_all_kinds_travel_by_each_carrier_under_tls(
    serve_tls: Serve, node: Node, carrier: str
) -> None:
    server, client = serve_tls(node)
    server.bind("arrays", lambda: (np.full(1 << 17, index) for index in range(20)))
    peer = client.apply(_peer)
    assert ("127.0.0.1" not in peer) == (carrier == "unix"), peer
    array = np.random.default_rng(1).integers(0, 1 << 62, 1 << 21)
    np.testing.assert_array_equal(client.echo(array), array)
    futures = [client.futures.echo(index) for index in range(1000)]
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(1000))
    done = threading.Semaphore(0)
    for _ in range(20):  # nobody waits for these
        client.futures.echo(array[: 1 << 17]).add_done_callback(lambda _: done.release())
    assert all(done.acquire(timeout=_PATIENCE_S) for _ in range(20))
    assert list(client.count(2000)) == list(range(2000))
    assert [int(item[-1]) for item in client.arrays()] == list(range(20))
    with pytest.raises(KeyError, match="as asked"):
        client.fail()
    pending = client.futures.hang()
    node.await_calls()
    node.release.set()  # who was cancelled ends at once
    server.stop(0.0)
    with pytest.raises(courier.ServerLostError):
        pending.result(_PATIENCE_S)


def test_threads_share_a_connection_under_tls_also_compressed(
    serve_tls: Serve, carrier: str
) -> None:
    _, client = serve_tls(Node(), client={"compress": True})

    def call(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for size in generator.integers(1, 1 << 18, 20):
            array = generator.integers(0, 256, int(size), np.uint8)
            np.testing.assert_array_equal(client.echo(array), array)
            assert client.echo(seed) == seed

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(8)))


def test_plain_grpc_clients_come_in_by_certificates(
    serve_tls: Serve,
    secret: courier.Secret,
    tls: courier.TlsCredentials,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, _ = serve_tls(Node())
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    monkeypatch.setattr(
        grpc,
        "insecure_channel",
        lambda address, options: grpc.secure_channel(address, credentials, options=options),
    )
    client = GrpcClient(server.address, secret)
    try:
        assert client.is_trusted
        array = np.arange(1 << 20)
        np.testing.assert_array_equal(client.call("echo", array), array)
        assert list(client.call("count", 5)) == [0, 1, 2, 3, 4]
        with pytest.raises(KeyError, match="as asked"):
            client.call("fail")
    finally:
        client.close()


@pytest.mark.parametrize("kind", ["plain", "no certificate", "foreign"])
def test_grpc_clients_without_a_certificate_of_the_authority_stay_outside(
    kind: str, serve_tls: Serve, tls: courier.TlsCredentials, foreign_authority: Authority
) -> None:
    server, client = serve_tls(Node())
    if kind == "plain":
        channel = grpc.insecure_channel(server.address)
    else:
        own = foreign_authority.pems() if kind == "foreign" else (None, None)
        channel = grpc.secure_channel(
            server.address, grpc.ssl_channel_credentials(tls.authority, own[1], own[0])
        )
    with channel:
        hello = channel.unary_unary("/courier.v1.Courier/Hello")
        with refused(grpc.StatusCode.UNAVAILABLE):
            hello(b"", timeout=20)
    assert client.echo(1) == 1


def test_health_checks_need_no_certificate(serve_tls: Serve) -> None:
    server, _ = serve_tls(Node())
    assert courier.is_healthy(server.address, _PATIENCE_S)


_REFUSED = {
    "of another authority": r"127\.0\.0\.1:\d+.*authority",
    "not trusted by the server": "authority",
    "expired": "(?i)expired",
    "expired at the server": "(?i)expired",
    "none": "tls=",
    "none at the server": "TLS",
}


@pytest.mark.parametrize("certificate", _REFUSED)
def test_who_has_no_valid_certificate_is_told_so_at_once(
    certificate: str,
    serve: Serve,
    authority: Authority,
    tls: courier.TlsCredentials,
    foreign_authority: Authority,
) -> None:
    theirs = ours = tls
    if certificate == "of another authority":
        ours = foreign_authority.issue()
    elif certificate == "not trusted by the server":
        name, key = foreign_authority.pems()
        ours = courier.TlsCredentials(certificate=name, key=key, authority=authority.certificate)
    elif certificate == "expired":
        ours = authority.issue(days=-1)
    elif certificate == "expired at the server":
        theirs = authority.issue(days=-1)
    servers = {} if certificate == "none at the server" else {"tls": theirs}
    clients = {} if certificate == "none" else {"tls": ours}
    for _ in range(5):  # the refusal may overtake the end of the handshake, or not
        _, client = serve(Node(), **servers, client={**clients, "call_timeout": _PATIENCE_S})
        with pytest.raises(courier.AuthenticationError, match=_REFUSED[certificate]):
            client.echo(1)


def test_a_server_that_leaves_during_the_handshake_is_lost_and_no_stranger(
    meet: Meet, tls: courier.TlsCredentials, over_tcp: None
) -> None:
    def leave(visitor: Visitor) -> None:
        visitor.socket.recv(1 << 16)

    with (
        meet(leave, secret=None, tls=tls, wait_for_ready=False) as client,
        pytest.raises(courier.ServerUnreachableError, match="the peer left during"),
    ):
        client.echo(1)


def test_a_wrong_secret_is_refused_under_tls(serve_tls: Serve, carrier: str) -> None:
    _, client = serve_tls(
        Node(), client={"secret": courier.Secret.generate(), "call_timeout": _PATIENCE_S}
    )
    with pytest.raises(courier.AuthenticationError, match="secret"):
        client.echo(1)


def test_certificates_are_enough_where_there_is_no_secret(serve_tls: Serve, carrier: str) -> None:
    _, client = serve_tls(Node(), secret=None)
    assert client.echo(1) == 1


@pytest.mark.parametrize("carrier", ["unix", "tcp"], indirect=True)  # gRPC wants the name it calls
def test_a_certificate_may_bear_any_name(serve: Serve, authority: Authority, carrier: str) -> None:
    stranger = authority.issue(names=("elsewhere.example",))
    _, client = serve(
        Node(), tls=stranger, client={"tls": authority.issue(names=()), "call_timeout": 30}
    )
    assert client.echo(1) == 1


def test_a_raw_tls_client_without_a_certificate_is_shown_out_and_garbage_harms_nobody(
    serve_tls: Serve, tls: courier.TlsCredentials
) -> None:
    server, client = serve_tls(Node())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=tls.authority.decode())
    with socket.create_connection(("127.0.0.1", server.port), _PATIENCE_S) as sock:
        sock.sendall(OPENING)
        with pytest.raises(OSError, match=r"(?i)certificate|reset|broken"):
            _read_encrypted(context, sock)
    for garbage in (b"\x16", b"\x16\x03\x01\xff\xff" + bytes(100), os.urandom(100), b""):
        with socket.create_connection(("127.0.0.1", server.port), _PATIENCE_S) as sock:
            sock.sendall(OPENING + garbage)
    assert client.echo(1) == 1


def _read_encrypted(context: ssl.SSLContext, sock: socket.socket) -> None:
    with context.wrap_socket(sock) as encrypted:
        if not encrypted.recv(1):
            raise ConnectionResetError("a reset, in good order")


def test_a_stranger_costs_little_until_its_certificate_was_seen(serve_tls: Serve) -> None:
    server, client = serve_tls(Node())
    assert client.echo(1) == 1
    used = psutil.Process().memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            sock = socket.create_connection(("127.0.0.1", server.port), _PATIENCE_S)
            stack.enter_context(sock).sendall(OPENING + b"\x16\x03\x01\x02\0")
        assert client.echo(2) == 2
        wait_until(lambda: len(server._host._unproven) == 200)
        assert psutil.Process().memory_info().rss - used < 200 * (128 << 10)


def test_what_travels_under_tls_cannot_be_read_on_the_way(
    serve_tls: Serve, meet: Meet, tls: courier.TlsCredentials, over_tcp: None
) -> None:
    server, _ = serve_tls(Node())
    heard: list[bytes] = []
    text = "nobody shall read this" * 10
    with meet(lambda peer: relay(peer.socket, server.address, heard), tls=tls) as client:
        assert client.echo(text) == text
    everything = b"".join(heard)
    assert len(everything) > 2 * len(text)
    assert b"nobody shall read this" not in everything
    assert b"echo" not in everything


def test_credentials_are_never_in_a_pickle(
    tls: courier.TlsCredentials, secret: courier.Secret
) -> None:
    client = courier.Client("127.0.0.1:1", secret=secret, tls=tls)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps((tls, client), protocol)
        for part in (tls.key, tls.certificate):
            body = b"".join(part.splitlines()[1:-1])
            assert body not in data.replace(b"\n", b"").replace(b"\\n", b"")


def test_a_pickled_client_loads_only_where_credentials_of_the_authority_are_held(
    script: Script, serve_tls: Serve, authority: Authority
) -> None:
    _, client = serve_tls(Node())
    certificate, key = authority.pems()
    process = script(
        "import pickle\n"
        "try:\n"
        f"    pickle.loads({pickle.dumps(client)!r})\n"
        "except courier.AuthenticationError as error:\n"
        "    print('refused', error)\n"
        f"tls = courier.TlsCredentials(certificate={certificate!r}, key={key!r}, "
        f"authority={authority.certificate!r})\n"
        f"client = pickle.loads({pickle.dumps(client)!r})\n"
        "print('echo', client.echo(7))\n"
    )
    out = process.output()
    assert out.startswith("refused")
    assert "authority" in out
    assert out.endswith("echo 7")


@pytest.mark.parametrize("kind", ["equal", "other"])
def test_credentials_are_found_as_long_as_any_of_the_authority_are_held(
    kind: str, tmp_path: Path
) -> None:
    authority = Authority()
    first = authority.issue()
    second = authority.issue() if kind == "other" else courier.TlsCredentials(**_of(first))
    data = pickle.dumps(courier.Client("127.0.0.1:1", tls=second))
    del first
    gc.collect()
    pickle.loads(data)


def test_nothing_is_kept_of_credentials_that_nobody_holds(authority: Authority) -> None:
    certificate, key = authority.pems()
    parts = {"certificate": certificate, "key": key, "authority": authority.certificate + b"\n"}
    before = [sys.getrefcount(part) for part in parts.values()]
    courier.TlsCredentials(**parts).server_context()
    gc.collect()
    assert [sys.getrefcount(part) for part in parts.values()] == before


def test_equal_credentials_are_equal_and_say_nothing_of_themselves(
    authority: Authority, tls: courier.TlsCredentials
) -> None:
    same = courier.TlsCredentials(certificate=tls.certificate, key=tls.key, authority=tls.authority)
    assert same == tls
    assert hash(same) == hash(tls)
    assert authority.issue() != tls
    assert repr(tls) == "TlsCredentials(...)"


def _of(tls: courier.TlsCredentials, **changes: bytes) -> dict[str, bytes]:
    return {"certificate": tls.certificate, "key": tls.key, "authority": tls.authority, **changes}


@pytest.mark.parametrize("part", ["certificate", "key", "authority"])
@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"no certificate",
        b"\xff\xfe\x00",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ],
)
def test_what_is_no_pem_is_a_value_error(
    part: str, bad: bytes, tls: courier.TlsCredentials
) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        courier.TlsCredentials(**_of(tls, **{part: bad}))


def test_a_key_of_another_certificate_or_an_encrypted_one_is_a_value_error(
    authority: Authority, tls: courier.TlsCredentials
) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        courier.TlsCredentials(**_of(tls, key=authority.pems()[1]))
    certificate, key = authority.pems(pass_phrase="open sesame")
    heard = _said_at_a_terminal(
        f"import sys; sys.path.insert(0, {str(_ROOT)!r})\n"
        "import courier\n"
        "try:\n"
        f"    courier.TlsCredentials(**{_of(tls, certificate=certificate, key=key)!r})\n"
        "except ValueError:\n"
        "    print('refused')\n"
    )
    assert b"refused" in heard
    assert b"phrase" not in heard, "nobody is asked for a pass phrase"


_TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"


def _said_at_a_terminal(source: str) -> bytes:
    ours, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL + source],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(60)
        os.set_blocking(ours, False)
        with contextlib.suppress(OSError):
            return os.read(ours, 1 << 16)
        return b""
    finally:
        child.kill()
        child.wait()
        os.close(ours)
