import concurrent.futures
import contextlib
import gc
import os
import pickle
import pty
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import courier
from courier._engine.handshake import Purpose, prefix
from tests.courier.certificates import Authority
from tests.courier.conftest import Script, Serve, go_by
from tests.courier.grpc_client import GrpcClient

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 20.0


class Node:
    def __init__(self) -> None:
        self.started = threading.Event()
        self.cancelled = threading.Event()

    def echo(self, value: Any) -> Any:
        return value

    def peer(self) -> str:
        return courier.current_call().peer

    def total(self, array: Any) -> int:
        return int(array.sum(dtype=np.int64))

    def count(self, end: int) -> Iterator[int]:
        yield from range(end)

    def arrays(self, count: int) -> Iterator[Any]:
        for index in range(count):
            yield np.full(1 << 17, index, np.int64)

    def fail(self) -> None:
        raise KeyError("as asked")

    def hang(self) -> None:
        self.started.set()
        courier.current_call().wait_cancelled(60)
        self.cancelled.set()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def foreign_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "foreign")


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


def test_clients_come_by_each_carrier_under_tls(serve_tls: Serve, carrier: str) -> None:
    _, client = serve_tls(Node())
    peer = client.peer()
    is_local = "127.0.0.1" not in peer
    assert is_local == (carrier != "tcp"), peer


def test_large_arrays_travel_both_ways_under_tls(serve_tls: Serve, carrier: str) -> None:
    _, client = serve_tls(Node())
    array = np.random.default_rng(1).integers(0, 1 << 62, 1 << 23)
    np.testing.assert_array_equal(client.echo(array), array)


def test_thousands_of_futures_are_answered_under_tls(serve_tls: Serve, carrier: str) -> None:
    _, client = serve_tls(Node())
    futures = [client.futures.echo(index) for index in range(3000)]
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(3000))


def test_callbacks_of_futures_run_under_tls_though_nobody_waits(
    serve_tls: Serve, carrier: str
) -> None:
    _, client = serve_tls(Node())
    done = threading.Semaphore(0)
    array = np.arange(1 << 17)
    for _ in range(20):
        client.futures.echo(array).add_done_callback(lambda _: done.release())
    assert all(done.acquire(timeout=_PATIENCE_S) for _ in range(20))


def test_threads_share_a_connection_under_tls(serve_tls: Serve, carrier: str) -> None:
    _, client = serve_tls(Node())

    def call(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for size in generator.integers(1, 1 << 18, 20):
            array = generator.integers(0, 256, int(size), np.uint8)
            np.testing.assert_array_equal(client.echo(array), array)
            assert client.echo(seed) == seed

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(8)))


def test_generators_bring_their_items_under_tls(serve_tls: Serve, carrier: str) -> None:
    _, client = serve_tls(Node())
    assert list(client.count(2000)) == list(range(2000))
    assert [int(item[-1]) for item in client.arrays(20)] == list(range(20))


def test_exceptions_arrive_as_themselves_under_tls(serve_tls: Serve, carrier: str) -> None:
    _, client = serve_tls(Node())
    with pytest.raises(KeyError, match="as asked"):
        client.fail()


def test_a_deadline_ends_a_call_under_tls(serve_tls: Serve, carrier: str) -> None:
    node = Node()
    _, client = serve_tls(node)
    assert client.echo(1) == 1
    while not node.started.is_set():  # to connect may take longer
        with pytest.raises(courier.CallTimeoutError):
            courier.with_timeout(client, 3).hang()
    assert node.cancelled.wait(_PATIENCE_S)


def test_a_server_that_stops_is_noticed_under_tls(serve_tls: Serve, carrier: str) -> None:
    node = Node()
    server, client = serve_tls(node)
    pending = client.futures.hang()
    pending.add_done_callback(lambda _: None)
    assert node.started.wait(_PATIENCE_S)
    server.stop(0.0)
    with pytest.raises(courier.ServerLostError):
        pending.result(_PATIENCE_S)


def test_compressed_arguments_travel_under_tls(serve_tls: Serve, over_tcp: None) -> None:
    _, client = serve_tls(Node(), client={"compress": True})
    assert client.total(np.ones(1 << 20, np.int64)) == 1 << 20


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
        with pytest.raises(grpc.RpcError) as caught:
            hello(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert client.echo(1) == 1


def test_health_checks_need_no_certificate(serve_tls: Serve) -> None:
    server, _ = serve_tls(Node())
    assert courier.is_healthy(server.address, _PATIENCE_S)


@pytest.mark.parametrize("round_", range(5))
def test_certificates_of_another_authority_are_refused_at_once(
    round_: int, serve: Serve, tls: courier.TlsCredentials, foreign_authority: Authority
) -> None:
    _, client = serve(
        Node(), tls=tls, client={"tls": foreign_authority.issue(), "call_timeout": _PATIENCE_S}
    )
    with pytest.raises(courier.AuthenticationError, match=r"127\.0\.0\.1:\d+.*authority"):
        client.echo(1)


@pytest.mark.parametrize("round_", range(5))
def test_a_client_that_trusts_the_server_and_is_not_trusted_hears_so_at_once(
    round_: int,
    serve: Serve,
    authority: Authority,
    tls: courier.TlsCredentials,
    foreign_authority: Authority,
) -> None:
    certificate, key = foreign_authority.pems()
    stranger = courier.TlsCredentials(
        certificate=certificate, key=key, authority=authority.certificate
    )
    _, client = serve(Node(), tls=tls, client={"tls": stranger, "call_timeout": _PATIENCE_S})
    with pytest.raises(courier.AuthenticationError, match="authority"):
        client.echo(1)


@pytest.mark.parametrize("expired", ["server", "client"])
def test_an_expired_certificate_is_refused_at_once(
    expired: str, serve: Serve, authority: Authority, tls: courier.TlsCredentials
) -> None:
    old = authority.issue(days=-1)
    _, client = serve(
        Node(),
        tls=old if expired == "server" else tls,
        client={"tls": old if expired == "client" else tls, "call_timeout": _PATIENCE_S},
    )
    with pytest.raises(courier.AuthenticationError, match=r"(?i)expired"):
        client.echo(1)


def test_a_client_without_certificates_is_told_that_the_server_wants_some(
    serve: Serve, tls: courier.TlsCredentials
) -> None:
    _, client = serve(Node(), tls=tls, client={"call_timeout": _PATIENCE_S})
    with pytest.raises(courier.AuthenticationError, match="tls="):
        client.echo(1)


def test_a_client_with_certificates_does_not_talk_to_a_server_without(
    serve: Serve, tls: courier.TlsCredentials
) -> None:
    _, client = serve(Node(), client={"tls": tls, "call_timeout": _PATIENCE_S})
    with pytest.raises(courier.AuthenticationError, match="TLS"):
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


def test_a_certificate_may_bear_any_name(serve: Serve, authority: Authority, carrier: str) -> None:
    if carrier == "grpc":
        pytest.skip("gRPC wants the name that it calls")
    stranger = authority.issue(names=("DNS:elsewhere.example",))
    _, client = serve(
        Node(), tls=stranger, client={"tls": authority.issue(names=()), "call_timeout": 30}
    )
    assert client.echo(1) == 1


def test_a_raw_tls_client_without_a_certificate_is_shown_out(
    serve_tls: Serve, tls: courier.TlsCredentials
) -> None:
    server, client = serve_tls(Node())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=tls.authority.decode())
    with socket.create_connection(("127.0.0.1", server.port), _PATIENCE_S) as sock:
        sock.sendall(prefix(Purpose.CALLS))
        with pytest.raises(OSError, match=r"(?i)certificate|reset|broken"):
            _read_encrypted(context, sock)
    assert client.echo(1) == 1


def _read_encrypted(context: ssl.SSLContext, sock: socket.socket) -> None:
    with context.wrap_socket(sock) as encrypted:
        if not encrypted.recv(1):
            raise ConnectionResetError("a reset, in good order")


def test_garbage_where_tls_should_begin_harms_nobody(serve_tls: Serve) -> None:
    server, client = serve_tls(Node())
    for garbage in (b"\x16", b"\x16\x03\x01\xff\xff" + bytes(100), os.urandom(100), b""):
        with socket.create_connection(("127.0.0.1", server.port), _PATIENCE_S) as sock:
            sock.sendall(prefix(Purpose.CALLS) + garbage)
    assert client.echo(1) == 1


def test_what_travels_under_tls_cannot_be_read_on_the_way(
    serve_tls: Serve, connect: Callable[..., Any], tls: courier.TlsCredentials, over_tcp: None
) -> None:
    server, _ = serve_tls(Node())
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=_relay, args=(listener, server.port, heard))
        relay.start()
        client = connect(f"127.0.0.1:{listener.getsockname()[1]}", tls=tls, call_timeout=30)
        text = "nobody shall read this" * 10
        assert client.echo(text) == text
        courier.close(client)
        relay.join(_PATIENCE_S)
    everything = b"".join(heard)
    assert len(everything) > 2 * len(text)
    assert b"nobody shall read this" not in everything
    assert b"echo" not in everything


def _relay(listener: socket.socket, port: int, heard: list[bytes]) -> None:
    def copy(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            heard.append(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    near, _ = listener.accept()
    with near, socket.create_connection(("127.0.0.1", port)) as far:
        back = threading.Thread(target=copy, args=(far, near))
        back.start()
        copy(near, far)
        back.join()


def test_a_pickled_client_works_where_credentials_of_the_authority_are_held(
    serve_tls: Serve,
) -> None:
    _, client = serve_tls(Node())
    copy = pickle.loads(pickle.dumps(client))
    try:
        assert copy.echo(3) == 3
    finally:
        courier.close(copy)


def test_credentials_are_never_in_a_pickle(
    tls: courier.TlsCredentials, secret: courier.Secret
) -> None:
    client = courier.Client("127.0.0.1:1", secret=secret, tls=tls)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps((tls, client), protocol)
        for part in (tls.key, tls.certificate):
            body = b"".join(part.splitlines()[1:-1])
            assert body not in data.replace(b"\n", b"").replace(b"\\n", b"")


def test_a_pickled_client_does_not_load_where_no_credentials_of_the_authority_are_held(
    script: Script, tls: courier.TlsCredentials
) -> None:
    data = pickle.dumps(courier.Client("127.0.0.1:1", tls=tls))
    process = script(
        "import pickle\n"
        "try:\n"
        f"    pickle.loads({data!r})\n"
        "except courier.AuthenticationError as error:\n"
        "    print('refused', error)\n"
    )
    out, err = process.communicate(timeout=60)
    assert "refused" in out, err
    assert "authority" in out


def test_other_credentials_of_the_same_authority_load_a_pickled_client(
    script: Script, serve_tls: Serve, authority: Authority
) -> None:
    _, client = serve_tls(Node())
    certificate, key = authority.pems()
    process = script(
        "import pickle\n"
        f"tls = courier.TlsCredentials(certificate={certificate!r}, key={key!r}, "
        f"authority={authority.certificate!r})\n"
        f"client = pickle.loads({pickle.dumps(client)!r})\n"
        "print('echo', client.echo(7))\n"
    )
    out, err = process.communicate(timeout=60)
    assert out.strip() == "echo 7", err


@pytest.mark.parametrize("kind", ["equal", "other"])
def test_credentials_are_found_as_long_as_any_of_the_authority_are_held(
    kind: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    first = authority.issue()
    second = authority.issue() if kind == "other" else courier.TlsCredentials(**_of(first))
    data = pickle.dumps(courier.Client("127.0.0.1:1", tls=second))
    del first
    gc.collect()
    pickle.loads(data)


def test_equal_credentials_are_equal_and_say_nothing_of_themselves(
    authority: Authority, tls: courier.TlsCredentials
) -> None:
    same = courier.TlsCredentials(certificate=tls.certificate, key=tls.key, authority=tls.authority)
    assert same == tls
    assert hash(same) == hash(tls)
    assert authority.issue() != tls
    assert repr(tls) == "TlsCredentials(...)"


def _of(tls: courier.TlsCredentials, **changes: bytes) -> dict[str, bytes]:
    return {
        "certificate": tls.certificate,
        "key": tls.key,
        "authority": tls.authority,
        **changes,
    }


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


def test_a_key_of_another_certificate_is_a_value_error(
    authority: Authority, tls: courier.TlsCredentials
) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        courier.TlsCredentials(**_of(tls, key=authority.pems()[1]))


def test_an_encrypted_key_is_a_value_error_and_nobody_is_asked_for_its_pass_phrase(
    authority: Authority, tls: courier.TlsCredentials
) -> None:
    certificate, key = authority.pems(pass_phrase="open sesame")
    arguments = _of(tls, certificate=certificate, key=key)
    source = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r})\n"
        "import courier\n"
        "try:\n"
        f"    courier.TlsCredentials(**{arguments!r})\n"
        "except ValueError:\n"
        "    print('refused')\n"
    )
    heard = _said_at_a_terminal(source)
    assert b"refused" in heard
    assert b"phrase" not in heard


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


_SERVER = """
class Node:
    def echo(self, value):
        return value

    def peer(self):
        return courier.current_call().peer

    def count(self, end):
        yield from range(end)

    def params(self):
        return self.shared


node = Node()
node.shared = courier.Shared({"w": np.arange(1 << 20)})
with courier.Server(
    node, host=sys.argv[1], secret=secret, tls=tls, in_process="wire", keepalive_s=30
) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""

_CLIENT = """
from pathlib import Path

client = courier.Client(sys.argv[1], secret=secret, tls=tls, call_timeout=60)
assert "198.18.0.2" in client.peer(), client.peer()
array = np.random.default_rng(1).integers(0, 1 << 62, 1 << 23)
assert (client.echo(array) == array).all()
futures = [client.futures.echo(index) for index in range(3000)]
assert [future.result() for future in futures] == list(range(3000))
assert list(client.count(1000)) == list(range(1000))
assert (client.params()["w"] == np.arange(1 << 20)).all()
assert "memfd:courier" not in Path("/proc/self/maps").read_text()
without = courier.Client(sys.argv[1], secret=secret, call_timeout=20)
try:
    without.echo(1)
except courier.AuthenticationError:
    print("all is well")
"""


class _Namespaces:
    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:8]
        self.server, self.client = f"courier-{tag}-server", f"courier-{tag}-client"
        self._made: list[str] = []

    def connect(self) -> None:
        for name in (self.server, self.client):
            _ip("netns", "add", name)
            self._made.append(name)
        _ip(
            *("-n", self.server, "link", "add", "wire", "type", "veth"),
            *("peer", "wire", "netns", self.client),
        )
        for name, host in ((self.server, "198.18.0.1"), (self.client, "198.18.0.2")):
            _ip("-n", name, "address", "add", f"{host}/30", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)


def _ip(*command: str) -> None:
    done = subprocess.run(["ip", *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def namespaces() -> Iterator[_Namespaces]:
    reason = ""
    if shutil.which("ip") is None:
        reason = "needs iproute2"
    elif os.geteuid() != 0:
        reason = "needs root"
    made = _Namespaces()
    try:
        if not reason:
            try:
                made.connect()
            except AssertionError as error:
                reason = f"network namespaces cannot be made: {error}"
        if reason:
            assert os.environ.get("CI") != "true", f"CI checks this: {reason}"
            pytest.skip(reason)
        yield made
    finally:
        made.remove()


def test_nodes_of_two_network_namespaces_talk_by_tls(
    namespaces: _Namespaces, tmp_path: Path, secret: courier.Secret, tls: courier.TlsCredentials
) -> None:
    head = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r})\n"
        "import courier, numpy as np\n"
        f"secret = courier.Secret({secret.reveal()!r})\n"
        f"tls = courier.TlsCredentials(**{_of(tls)!r})\n"
    )
    (tmp_path / "server.py").write_text(head + _SERVER)
    (tmp_path / "client.py").write_text(head + _CLIENT)
    server = subprocess.Popen(
        [*_inside(namespaces.server), str(tmp_path / "server.py"), "198.18.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address.startswith("198.18.0.1:")
        client = subprocess.run(
            [*_inside(namespaces.client), str(tmp_path / "client.py"), address],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert client.stdout.strip() == "all is well", client.stderr
        server.communicate(timeout=20)
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()


def _inside(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace, sys.executable)
