"""One run's certificates: they work with each other, with nothing else, and stay in memory."""

import concurrent.futures
import contextlib
import os
import pickle
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

import courier
from launchers.hosts.trust import Authority
from launchpad_lite.errors import MissingExtraError
from launchpad_lite.life.policies import Liveness
from launchpad_lite.worker._liveness import SignsOfLife

_PATIENCE_S = 20.0


class Echo:
    def echo(self, value: Any) -> Any:
        return value


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("program")


@pytest.fixture
def server(authority: Authority) -> Iterator[courier.Server]:
    tls = authority.issue("server")
    with courier.Server(Echo(), secret=_SECRET, tls=tls, in_process="wire") as server:
        yield server


_SECRET = courier.Secret.generate()


def _certificate(tls: courier.TlsCredentials) -> x509.Certificate:
    return x509.load_pem_x509_certificate(tls.certificate)


def _call(server: courier.Server, tls: courier.TlsCredentials) -> Any:
    client: Any = courier.Client(
        server.address, secret=_SECRET, tls=tls, call_timeout=_PATIENCE_S, wait_for_ready=False
    )
    try:
        return client.echo(1)
    finally:
        courier.close(client)


def test_those_who_have_credentials_of_one_authority_talk(
    authority: Authority, server: courier.Server
) -> None:
    assert _call(server, authority.issue("client")) == 1


def test_certificates_hold_under_the_strictest_rules_and_check_of_names(
    authority: Authority,
) -> None:
    tls = authority.issue("server", ["host-1.cluster"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=tls.authority.decode())
    accepting = tls.server_context()
    accepting.verify_mode = ssl.CERT_NONE  # what the server asks of clients is shown elsewhere

    def meet(name: str) -> Any:
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(to_client, to_server, server_hostname=name)
        server = accepting.wrap_bio(to_server, to_client, server_side=True)
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        return server.version()

    assert meet("host-1.cluster") == "TLSv1.3"
    assert meet("127.0.0.1") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="host-2"):
        meet("host-2.cluster")


@pytest.fixture
def foreign(authority: Authority) -> Iterator[str]:
    """The address of a gRPC server that is none of ours, and is well."""
    tls = authority.issue("server")
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: b"\x08\x01")  # SERVING
    service = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler})
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((service,))
    credentials = grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)], tls.authority, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(_PATIENCE_S)


def test_grpc_servers_that_want_certificates_are_checked_with_those(
    authority: Authority, foreign: str
) -> None:
    assert courier.is_healthy(foreign, _PATIENCE_S, tls=authority.issue("client"))
    assert not courier.is_healthy(foreign, 1, tls=Authority("program").issue("client"))
    assert not courier.is_healthy(foreign, 1)


@pytest.mark.parametrize("served", ["foreign", "ours"])
def test_a_node_under_tls_shows_that_it_lives(
    served: str, authority: Authority, foreign: str, server: courier.Server
) -> None:
    shown = threading.Event()
    signs = SignsOfLife(Liveness(health_s=2), shown.set, lambda: None, list)
    signs.start(foreign if served == "foreign" else server.address, authority.issue("node"))
    assert shown.wait(_PATIENCE_S)
    signs.stop()


def test_a_certificate_bears_all_its_names_once(authority: Authority) -> None:
    tls = authority.issue("node", ["h1", "10.0.0.7", "fe80::1", "localhost", "gpu_3.example.org"])
    names = _certificate(tls).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["h1", "localhost", "gpu_3.example.org"]
    numbers = [str(number) for number in names.get_values_for_type(x509.IPAddress)]
    assert numbers == ["10.0.0.7", "fe80::1", "127.0.0.1", "::1"]


def test_certificates_have_fresh_keys_and_issue_no_others(authority: Authority) -> None:
    first, second = authority.issue("node"), authority.issue("node")
    assert first.key != second.key
    extensions = _certificate(first).extensions
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.value.ca, constraints.critical) == (False, True)
    usage = extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.digital_signature, usage.key_cert_sign) == (True, False)


def test_clocks_may_be_wrong_and_no_run_outlasts_its_certificates(authority: Authority) -> None:
    tls = authority.issue("node")
    for pem in (tls.certificate, tls.authority):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc.timestamp() == 0
        assert certificate.not_valid_after_utc.year == 9999


def test_long_names_of_programs_and_hosts_are_cut(authority: Authority) -> None:
    assert Authority("p" * 300).issue("n" * 300).certificate


def test_an_authority_is_not_pickled(authority: Authority) -> None:
    with pytest.raises(TypeError):
        pickle.dumps(authority)


_WRITES = """
import sys
opened = []
def note(event, args):
    if event == "open" and not isinstance(args[0], int) and (  # a number is of memory
            isinstance(args[1], str) and set(args[1]) & set("wax+")
            or args[2] & 0o3):  # O_WRONLY, O_RDWR
        opened.append(args[0])
    elif event in ("tempfile.mkstemp", "os.mkdir", "os.rename"):
        opened.append(event)
sys.dont_write_bytecode = True
from launchers.hosts.trust import Authority
print("cryptography" in sys.modules)
sys.addaudithook(note)
Authority("program").issue("node", ["h1"]).server_context()
print(opened)
with open("control", "w"):
    pass
print(opened)
"""


@pytest.mark.slow
def test_cryptography_is_loaded_when_needed_and_nothing_is_written_to_disk(tmp_path: Path) -> None:
    if not hasattr(os, "memfd_create"):
        pytest.skip("without memfd, `ssl` reads keys from a file that is removed at once")
    done = subprocess.run(
        [sys.executable, "-c", _WRITES],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", "[]", "['control']"]


def test_without_the_package_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'launchpad-lite\[ssh\]'"):
        Authority("program")
