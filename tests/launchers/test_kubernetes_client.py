"""Requests to an API server that is busy, breaks off, refuses or says nothing."""

import base64
import contextlib
import dataclasses
import datetime as dt
import ipaddress
import json
import os
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from launchers.hosts.trust import Authority
from launchers.kubernetes import _client as client_module
from launchers.kubernetes._client import Api, ApiError, Cancellation, created_by
from launchers.kubernetes._timing import Timing
from launchpad_lite.errors import LaunchError, MissingExtraError
from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.kubeconfig import write_config
from tests.launchers.kubernetes_access import HASTY, serving

pytest.importorskip("kubernetes.client")

PODS = "/api/v1/namespaces/team/pods"
JOBS = "/apis/batch/v1/namespaces/team/jobs"


@dataclass(frozen=True)
class Answer:
    """What a server answers.

    Attributes:
        status: Of HTTP.
        body: JSON, or text.
        headers: Further ones.
        lines: Instead of a body: a stream of these.
        then: How the stream continues: its `end`, it `breaks`, or the server `hangs`.
    """

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    lines: Sequence[Any] | None = None
    then: str = "end"


BREAKS = Answer(0)
HANGS = Answer(-1)


def refusal(status: int, reason: str, message: str, **headers: str) -> Answer:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message}
    return Answer(status, body, headers)


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    headers: dict[str, str]
    certificate: Any = None


class Stub:
    """A server with an answer for each request, in order; the last one stays."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answers: dict[tuple[str, str], list[Answer]] = {}
        self.requests: list[Request] = []
        self._leave = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stub.answer(self)

            do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 - as http.server has them

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if context is not None:
            # They shake hands in the thread of the connection, at its first byte.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self._server.handle_error = lambda *_: None  # type: ignore[method-assign] # not trusted
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"

    def on(self, method: str, path: str, *answers: Answer) -> None:
        self.answers[method, path] = list(answers)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        length = int(handler.headers.get("Content-Length") or 0)
        data = handler.rfile.read(length)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = json.loads(data) if data else None
        self.requests.append(
            Request(
                handler.command,
                parts.path,
                query,
                body,
                {k.lower(): v for k, v in handler.headers.items()},
                getattr(handler.connection, "getpeercert", lambda: None)(),
            )
        )
        known = self.answers.get((handler.command, parts.path), [refusal(404, "NotFound", "no")])
        answer = known.pop(0) if len(known) > 1 else known[0]
        if answer is HANGS:
            self._leave.wait()
        if answer in (BREAKS, HANGS):
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
        elif answer.lines is not None:
            self._stream(handler, answer)
        else:
            text = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
            handler.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": len(text.encode())}.items():
                handler.send_header(name, str(value))
            handler.end_headers()
            handler.wfile.write(text.encode())

    def _stream(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for line in answer.lines or ():
            data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        if answer.then == "hangs":
            self._leave.wait()
        if answer.then == "end":
            handler.wfile.write(b"0\r\n\r\n")
        else:
            handler.close_connection = True

    def paths(self, method: str) -> list[str]:
        return [each.path for each in self.requests if each.method == method]

    def close(self) -> None:
        self._leave.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    server.on("GET", PODS, Answer(body=listing()))
    yield server
    server.close()


def listing(*items: dict[str, Any], version: str = "1") -> dict[str, Any]:
    return {"kind": "List", "metadata": {"resourceVersion": version}, "items": list(items)}


def pod(name: str, version: str = "1", **labels: str) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": version,
            "labels": labels,
        },
    }


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the kubeconfig that is used from now on."""

    def write(server: str, **config: Any) -> Path:
        path = write_config(tmp_path, server, **{"namespace": "team", **config})
        monkeypatch.setenv("KUBECONFIG", str(path))
        return path

    return write


Write = Callable[..., Path]


def connected(timing: Timing = HASTY, **options: Any) -> contextlib.closing[Api]:
    return contextlib.closing(Api.connect(timing=timing, **options))


@pytest.fixture
def api(stub: Stub, write: Write) -> Iterator[Api]:
    write(stub.url)
    with connected() as api:
        stub.requests.clear()
        yield api


# Configuration


def test_the_context_says_who_where_and_in_which_namespace(api: Api, stub: Stub) -> None:
    assert (api.namespace, api.server) == ("team", stub.url)
    api.list("Pod", "launchpad-lite/run=x")
    (request,) = stub.requests
    assert request.headers["authorization"].lower() == "bearer a-token"
    assert request.query["labelSelector"] == "launchpad-lite/run=x"


def test_another_context_and_namespace_may_be_named(api: Api, stub: Stub) -> None:
    stub.on("GET", "/api/v1/namespaces/other/pods", Answer(body=listing()))
    stub.on("GET", "/api/v1/namespaces/third/pods", Answer(body=listing()))
    assert Api.connect("two").namespace == "other"
    assert Api.connect("two", "third").namespace == "third"
    with pytest.raises(LaunchError, match="three"):
        Api.connect("three")


@pytest.mark.parametrize(
    ("config", "is_in_pod", "expected"),
    [
        ("- no\n- mapping: [", False, "the kubeconfig .*config cannot be used"),
        (None, False, "no Kubernetes cluster is known.*Set KUBECONFIG"),
        (None, True, "service account"),
    ],
    ids=["no YAML", "no cluster", "no token"],
)
def test_a_cluster_that_is_not_known_is_told_with_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str | None,
    is_in_pod: bool,
    expected: str,
) -> None:
    if config is not None:
        (tmp_path / "config").write_text(config)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if is_in_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(LaunchError, match=expected):
        Api.connect()


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'launchpad-lite\[kubernetes\]'"):
        Api.connect()


def test_a_server_that_is_not_there_is_named(write: Write) -> None:
    write("http://127.0.0.1:9")
    with pytest.raises(ApiError, match=r"http://127.0.0.1:9 does not answer.*refused") as caught:
        Api.connect(timing=HASTY)
    assert caught.value.status is None
    assert "object at" not in str(caught.value)


@pytest.mark.parametrize("later", ["three", ""])
def test_the_first_kubeconfig_that_names_a_context_is_meant(
    stub: Stub, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    first = write(stub.url)
    second = json.loads(first.read_text().replace("one", "three").replace("here", "there"))
    second["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    second["current-context"] = later
    (tmp_path / "second").write_text(json.dumps(second))
    (tmp_path / "empty").touch()
    paths = [tmp_path / "empty", first, tmp_path / "second"]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, paths)))
    with connected() as api:
        assert (api.server, api.namespace) == (stub.url, "team")


def test_requests_are_those_of_whom_the_kubeconfig_impersonates(stub: Stub, write: Write) -> None:
    write(stub.url, user={"as": "system:serviceaccount:team:someone", "as-groups": []})
    with connected() as api:
        api.list("Pod")
    seen = [each.headers["impersonate-user"] for each in stub.requests]
    assert seen == ["system:serviceaccount:team:someone"] * 2


def test_an_impersonation_that_would_be_another_is_refused(stub: Stub, write: Write) -> None:
    write(stub.url, user={"as": "someone", "as-groups": ["some"]})
    with pytest.raises(LaunchError, match="by as-groups; of these ways only `as` is served"):
        Api.connect()
    assert not stub.requests


@pytest.mark.parametrize("name", ["authorization", "BearerToken"])
def test_a_login_is_sent_whatever_a_release_of_the_package_calls_it(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from kubernetes import client

    # As in 36.0.0, which looks for it under another name than it is stored by.
    monkeypatch.setattr(client.Configuration, "auth_settings", lambda _: {})
    configuration = client.Configuration()
    configuration.host = stub.url
    configuration.api_key = {name: "Bearer a-token"}
    with contextlib.closing(Api(client.ApiClient(configuration), "team")) as api:
        api.list("Pod")
    assert stub.requests[0].headers["authorization"] == "Bearer a-token"


# Proxies


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One that has no proxies."""
    for name in ("http", "https", "no", "all"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("server", "variables", "expected"),
    [
        ("https://a.example", {"HTTPS_PROXY": "http://proxy:1"}, "http://proxy:1"),
        ("https://a.example", {"HTTPS_PROXY": "proxy:1"}, "http://proxy:1"),
        ("https://a.example", {"HTTP_PROXY": "http://proxy:1"}, None),
        ("https://a.example", {"ALL_PROXY": "http://proxy:1"}, None),
        ("http://a.example", {"HTTP_PROXY": "http://proxy:1"}, "http://proxy:1"),
        ("https://a.example:port", {"HTTPS_PROXY": "http://proxy:1"}, None),
        ("https://localhost:6443", {"HTTPS_PROXY": "http://proxy:1"}, None),
        ("https://127.0.0.2:6443", {"HTTPS_PROXY": "http://proxy:1"}, None),
        ("https://[::1]:6443", {"HTTPS_PROXY": "http://proxy:1"}, None),
    ],
)
def test_a_proxy_is_taken_from_the_environment_as_by_kubectl(
    environment: pytest.MonkeyPatch, server: str, variables: dict[str, str], expected: str | None
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert client_module._proxy_from_environment(server) == expected


@pytest.mark.parametrize(
    ("rules", "server", "is_direct"),
    [
        ("*", "a.example", True),
        ("other, A.example", "a.example", True),
        ("example", "a.example", True),
        (".example", "a.example", True),
        ("*.example", "a.example", True),
        ("ample", "a.example", False),
        ("a.example:6443", "a.example:6443", True),
        ("a.example:6443", "a.example", False),
        (",,", "a.example", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.0.0.0/8,a/8", "a.example", False),
        ("10.1.2.3", "10.1.2.3:6443", True),
        ("10.1.2.3:6443", "10.1.2.3", False),
        ("fd00::1", "[fd00::1]:6443", True),
        ("fd00::/8", "[fd00::1]", True),
    ],
)
def test_what_needs_no_proxy_is_told_as_to_kubectl(
    environment: pytest.MonkeyPatch, rules: str, server: str, is_direct: bool
) -> None:
    environment.setenv("HTTPS_PROXY", "http://proxy:1")
    environment.setenv("NO_PROXY", rules)
    expected = None if is_direct else "http://proxy:1"
    assert client_module._proxy_from_environment(f"https://{server}") == expected


@pytest.mark.parametrize("is_in_environment", [True, False])
def test_the_proxy_is_that_of_the_cluster_or_of_the_environment(
    stub: Stub, write: Write, environment: pytest.MonkeyPatch, is_in_environment: bool
) -> None:
    if is_in_environment:
        environment.setenv("HTTP_PROXY", stub.url)
    else:
        environment.setenv("NO_PROXY", "*")  # which is not about it
    write("http://a.invalid", cluster={} if is_in_environment else {"proxy-url": stub.url})
    with connected() as api:
        assert api.list("Pod") == []
    assert [each.headers["host"] for each in stub.requests] == ["a.invalid"] * 2


def test_a_proxy_of_an_unknown_kind_is_named_without_its_login(write: Write) -> None:
    write("http://a.invalid", cluster={"proxy-url": "gopher://me:geheim@there"})
    with pytest.raises(LaunchError, match=r"the proxy gopher://there .* cannot be used") as caught:
        Api.connect()
    assert "geheim" not in str(caught.value)


# Certificates


def served_by(folder: Path, certificate: bytes) -> ssl.SSLContext:
    """Returns what a server needs to be the one of a certificate, which comes with its key."""
    (folder / "server.pem").write_bytes(certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context


@contextlib.contextmanager
def secure_stub(context: ssl.SSLContext) -> Iterator[Stub]:
    """A server that wants a new connection for each request."""
    server = Stub(context)
    server.on("GET", PODS, Answer(body=listing(), headers={"Connection": "close"}))
    yield server
    server.close()


def inline(pem: bytes) -> dict[str, str]:
    return {"certificate-authority-data": base64.b64encode(pem).decode()}


def test_certificates_that_are_renewed_in_their_files_are_used(
    tmp_path: Path, write: Write
) -> None:
    authority = Authority("a cluster")
    server, *logins = [authority.issue(name) for name in ("server", "first", "second")]
    context = served_by(tmp_path, server.certificate + server.key)
    context.load_verify_locations(cadata=server.authority.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    file = tmp_path / "login.pem"
    user = {"client-certificate": str(file), "client-key": str(file)}
    file.write_bytes(logins[0].certificate + logins[0].key)
    with secure_stub(context) as stub:
        write(stub.url, cluster=inline(server.authority), user=user)
        with connected() as api:
            for content in (b"half of it", logins[1].certificate + logins[1].key):
                file.write_bytes(content)
                os.utime(file, (len(content), len(content)))
                api.list("Pod")
        subjects = [str(each.certificate["subject"]) for each in stub.requests]
    assert ["first" in each for each in subjects] == [True, True, False]
    assert "second" in subjects[2]


def test_a_login_in_an_encrypted_file_is_refused_without_a_question(
    tmp_path: Path, write: Write
) -> None:
    from cryptography.hazmat.primitives import serialization as form

    login = Authority("a cluster").issue("me")
    key = form.load_pem_private_key(login.key, None).private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.BestAvailableEncryption(b"geheim")
    )
    (tmp_path / "login.pem").write_bytes(login.certificate + key)
    file = str(tmp_path / "login.pem")
    with secure_stub(served_by(tmp_path, login.certificate + login.key)) as stub:
        user = {"client-certificate": file, "client-key": file}
        write(stub.url, cluster=inline(login.authority), user=user)
        with pytest.raises(ApiError, match="no secure connection") as caught:
            Api.connect(timing=HASTY)
    assert "Invalid argument" not in str(caught.value), "it was asked for"


@pytest.mark.parametrize(
    ("cluster", "is_right"),
    [
        ({"tls-server-name": "right"}, True),
        ({"tls-server-name": "wrong"}, False),
        ({"insecure-skip-tls-verify": True}, True),
    ],
)
@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_a_server_is_checked_as_the_kubeconfig_says(
    tmp_path: Path, write: Write, cluster: dict[str, Any], is_right: bool
) -> None:
    mine = Authority("a cluster").issue("server", ["right"])
    if "insecure-skip-tls-verify" not in cluster:
        cluster = {**cluster, **inline(mine.authority)}
    with secure_stub(served_by(tmp_path, mine.certificate + mine.key)) as stub:
        write(stub.url, cluster=cluster)
        if is_right:
            Api.connect().close()
        else:
            with pytest.raises(ApiError, match="no secure connection"):
                Api.connect()


def test_a_server_that_cannot_prove_who_it_is_is_asked_once(
    tmp_path: Path, write: Write, passing: "PassingTime"
) -> None:
    mine = Authority("a cluster").issue("server", ["127.0.0.1"])
    with secure_stub(served_by(tmp_path, mine.certificate + mine.key)) as stub:
        write(stub.url)
        with pytest.raises(ApiError, match=r"no secure connection.*certificate-authority"):
            Api.connect()
    assert not passing.pauses


def old_certificates() -> tuple[bytes, bytes]:
    """Returns a certificate with its key, and its authority, with no identifiers of keys."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())  # of both
    now, day = dt.datetime.now(tz=dt.timezone.utc), dt.timedelta(days=1)
    own, authority = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        for name in ("server", "authority")
    )

    def issued(name: x509.Name, extension: x509.ExtensionType) -> bytes:
        number = x509.random_serial_number()
        period = (now - day, now + day)
        builder = x509.CertificateBuilder(authority, name, key.public_key(), number, *period)
        signed = builder.add_extension(extension, critical=True).sign(key, hashes.SHA256())
        return signed.public_bytes(form.Encoding.PEM)

    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    key_pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    return (
        issued(own, x509.SubjectAlternativeName([address])) + key_pem,
        issued(authority, x509.BasicConstraints(ca=True, path_length=None)),
    )


def test_authorities_of_old_clusters_are_trusted_by_new_pythons(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import urllib3.connection
    import urllib3.util.ssl_

    create = urllib3.util.ssl_.create_urllib3_context

    def create_strictly(*args: Any, **options: Any) -> ssl.SSLContext:
        context = create(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    for module in (urllib3.util.ssl_, urllib3.connection):
        monkeypatch.setattr(module, "create_urllib3_context", create_strictly)
    certificate, authority = old_certificates()
    with secure_stub(served_by(tmp_path, certificate)) as stub:
        write(stub.url, cluster=inline(authority))
        Api.connect().close()


class Tunnel(BaseHTTPRequestHandler):
    """A proxy."""

    def do_CONNECT(self) -> None:
        host, _, port = self.path.partition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as target:
            self.send_response(200)
            self.end_headers()
            self._pump(self.connection, target)

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        while True:  # in one thread: a connection under TLS is not for two
            rest = isinstance(one, ssl.SSLSocket) and one.pending()
            ready = [one] if rest else select.select([one, other], [], [])[0]
            for source in ready:
                if not (data := source.recv(1 << 16)):
                    return
                (other if source is one else one).sendall(data)

    def log_message(self, *args: object) -> None: ...


@contextlib.contextmanager
def tunnel(context: ssl.SSLContext | None) -> Iterator[str]:
    """A proxy, itself behind TLS or not; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Tunnel)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server) as address:
        yield f"{'http' if context is None else 'https'}://{address}"


@pytest.mark.parametrize("by", ["itself", "a proxy", "a secure proxy"])
def test_certificates_that_were_tidied_away_are_not_forgotten_nor_is_a_proxy_in_their_way(
    tmp_path: Path, write: Write, by: str
) -> None:
    mine = Authority("a cluster").issue("server")
    context = served_by(tmp_path, mine.certificate + mine.key)
    cluster = inline(mine.authority)
    with contextlib.ExitStack() as stack:
        stub = stack.enter_context(secure_stub(context))
        if by != "itself":
            proxy = stack.enter_context(tunnel(context if "secure" in by else None))
            cluster["proxy-url"] = proxy
        write(stub.url, cluster=cluster)
        with connected() as api:
            Path(api._client.configuration.ssl_ca_cert).unlink()
            assert api.list("Pod") == []


def test_a_pod_speaks_with_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.config import incluster_config

    mine = Authority("a cluster").issue("server")
    account = {"token": b"a-token", "ca.crt": mine.authority, "namespace": b"team\n"}
    for name, content in account.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(client_module, "_NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with secure_stub(served_by(tmp_path, mine.certificate + mine.key)) as stub:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", stub.url.rpartition(":")[2])
        with connected() as api:
            assert api.namespace == "team"
        assert stub.requests[0].headers["authorization"].lower() == "bearer a-token"


# Requests


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((401, "Unauthorized", "Unauthorized"), "does not know who we are.*Log in again"),
        (
            (403, "Forbidden", 'User "me" cannot create resource "jobs" in API group "batch"'),
            r'we may not create jobs .* {"apiGroups": \["batch"\], "resources": \["jobs"\], "verbs"',
        ),
        ((403, "Forbidden", "exceeded quota: few"), "cannot create Job x.*: exceeded quota: few"),
        ((422, "Invalid", "spec.completions: Invalid value"), "spec.completions: Invalid value"),
    ],
    ids=["unknown", "without the right", "quota", "mistake"],
)
def test_what_is_refused_for_good_is_told_and_not_repeated(
    api: Api, stub: Stub, answer: tuple[int, str, str], expected: str
) -> None:
    stub.on("POST", JOBS, refusal(*answer))
    with pytest.raises(ApiError, match=expected) as caught:
        api.create({"kind": "Job", "metadata": {"name": "x"}})
    assert ("must have the rule" in str(caught.value)) == ("we may not" in expected)
    is_right = answer[0] in (401, 403)
    assert caught.value.is_final == is_right
    # The second time because a server may read its roles between two questions.
    assert stub.paths("POST") == [JOBS] * (2 if is_right else 1)


def test_a_server_that_refuses_all_has_just_begun_and_is_asked_again(api: Api, stub: Stub) -> None:
    unknown = refusal(403, "Forbidden", 'User "me" cannot delete resource "jobs"')
    stub.on("GET", PODS, unknown, unknown, Answer(body=listing()))
    stub.on("DELETE", f"{JOBS}/x", unknown, unknown, unknown, Answer(body={}))
    assert api.delete("Job", "x")
    stub.on("GET", PODS, unknown)
    stub.on("DELETE", f"{JOBS}/x", unknown)
    with pytest.raises(ApiError) as caught:
        api.delete("Job", "x", patience_s=0.1)
    assert not caught.value.is_final


@pytest.mark.parametrize("trouble", [429, 500, 503, 504, "breaks", "cut", "conflict"])
def test_a_request_is_tried_again(api: Api, stub: Stub, trouble: int | str) -> None:
    answer = {
        "breaks": BREAKS,
        "cut": Answer(body="{", headers={}),
        "conflict": refusal(409, "Conflict", "the object has been modified"),
    }.get(str(trouble))
    answer = answer or refusal(int(trouble), "Whatever", "later")
    stub.on("PATCH", f"{PODS}/x", answer, answer, Answer(body=pod("x")))
    assert api.patch("Pod", "x", {"metadata": {"annotations": {"a": "b"}}}) == pod("x")
    assert [each.body for each in stub.requests] == [{"metadata": {"annotations": {"a": "b"}}}] * 3


class PassingTime:
    """A clock that continues only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> PassingTime:
    """In place of the time of requests."""
    passing = PassingTime()
    monkeypatch.setattr(client_module, "time", passing)
    return passing


@pytest.fixture
def patient(stub: Stub, write: Write, passing: PassingTime) -> Iterator[Api]:
    """With the limits that users get."""
    write(stub.url)
    with connected(Timing()) as api:
        stub.requests.clear()
        yield api


def test_a_busy_server_is_given_the_time_it_asks_for_within_limits(
    patient: Api, stub: Stub, passing: PassingTime
) -> None:
    busy = [
        refusal(429, "TooManyRequests", "later", **{"Retry-After": text})
        for text in ("7", "3600", "Mon, 01 Jan 2029 00:00:00 GMT")
    ]
    stub.on("GET", PODS, *busy, Answer(body=listing()))
    assert patient.list("Pod") == []
    *asked, own = passing.pauses
    assert asked == [7.0, 30.0]
    assert 0.5 < own <= 1.0  # the third of our own


def test_trouble_that_stays_is_told_after_ever_longer_pauses(
    patient: Api, stub: Stub, passing: PassingTime
) -> None:
    stub.on("GET", PODS, refusal(500, "InternalError", "etcd is gone"))
    with pytest.raises(ApiError, match=r"cannot list Pod.*etcd is gone \(HTTP 500\)") as caught:
        patient.list("Pod")
    assert caught.value.status == 500
    assert len(stub.requests) == 7
    for pause_s, longest_s in zip(passing.pauses, (0.25, 0.5, 1.0, 2.0, 4.0, 4.0), strict=True):
        assert 0.7 * longest_s <= pause_s <= longest_s


def test_who_has_no_patience_is_told_of_trouble_sooner(
    patient: Api, stub: Stub, passing: PassingTime
) -> None:
    for method, path in (("GET", PODS), ("DELETE", f"{PODS}/x")):
        stub.on(method, path, refusal(500, "InternalError", "etcd is gone"))
    for ask in (
        lambda: patient.list("Pod", patience_s=1.0),
        lambda: patient.delete("Pod", "x", patience_s=1.0),
    ):
        began = passing.now
        with pytest.raises(ApiError, match="etcd is gone"):
            ask()
        assert 1.0 <= passing.now - began < 2.0


def test_a_server_that_says_nothing_is_given_up(stub: Stub, write: Write) -> None:
    write(stub.url)
    stub.on("GET", f"{PODS}/x/log", HANGS)
    timing = dataclasses.replace(HASTY, log_silence_s=0.1, attempts=2)
    with connected(timing) as api, pytest.raises(ApiError, match=r"does not answer.*timed out"):
        list(api.logs("x", "node"))


def test_what_somebody_else_created_is_a_mistake_however_alike_it_is(api: Api, stub: Stub) -> None:
    there = refusal(409, "AlreadyExists", 'pods "x" already exists')
    for author in (None, "somebody"):
        found = pod("x", run="demo")
        found["metadata"]["annotations"] = {"launchpad-lite/created-by": author}
        stub.on("GET", f"{PODS}/x", Answer(body=found))
        stub.on("POST", PODS, BREAKS, there)
        with pytest.raises(ApiError, match="already exists") as caught:
            api.create(pod("x", run="demo"))
        assert caught.value.reason == "AlreadyExists"


def test_an_object_is_checked_strictly_and_has_no_author_of_another(api: Api, stub: Stub) -> None:
    stub.on("POST", PODS, Answer(201, pod("x")))
    for _ in range(2):
        api.create(pod("x"))
    assert [each.query for each in stub.requests] == [{"fieldValidation": "Strict"}] * 2
    authors = {created_by(each.body) for each in stub.requests}
    assert len(authors - {None, ""}) == 2


def test_what_may_not_be_read_is_ours_if_it_belongs_to_what_is(api: Api, stub: Stub) -> None:
    stub.on("POST", PODS, BREAKS, refusal(409, "AlreadyExists", 'pods "x" already exists'))
    stub.on("GET", f"{PODS}/x", refusal(403, "Forbidden", 'User "me" cannot get resource "pods"'))
    owned = pod("x")
    owned["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "demo", "uid": "1"}]
    assert api.create(owned)["metadata"]["name"] == "x"
    stub.on("POST", PODS, BREAKS, refusal(409, "AlreadyExists", 'pods "x" already exists'))
    with pytest.raises(ApiError, match="already exists"):
        api.create(pod("x"))


def test_what_is_not_there_is_none_and_need_not_be_deleted(api: Api) -> None:
    assert api.get("Pod", "x") is None
    assert not api.delete("Pod", "x")


def test_a_delete_says_how_and_of_which_object_of_this_name(api: Api, stub: Stub) -> None:
    stub.on("DELETE", f"{PODS}/x", Answer(body=pod("x")))
    assert api.delete("Pod", "x", grace_s=0)
    assert stub.requests[-1].body["gracePeriodSeconds"] == 0
    assert api.delete("Pod", "x", uid="1")
    body = stub.requests[-1].body
    assert body["preconditions"] == {"uid": "1"}
    assert body["propagationPolicy"] == "Background"
    stub.on("DELETE", f"{PODS}/x", refusal(409, "Conflict", "the UID in the precondition differs"))
    assert not api.delete("Pod", "x", uid="1")


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Event", "/api/v1/namespaces/team/events"),
        ("JobSet", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets"),
    ],
)
def test_each_kind_has_its_place(api: Api, stub: Stub, kind: str, path: str) -> None:
    obj = {"metadata": {"name": "x", "uid": "1"}}
    stub.on("GET", path, Answer(body=listing(obj)))
    for method in ("GET", "PATCH", "DELETE"):
        stub.on(method, f"{path}/x", Answer(body=obj))
    stub.on("POST", path, Answer(201, obj))
    (found,) = api.list(kind)
    assert found["kind"] == kind
    assert found["apiVersion"]
    assert api.get(kind, "x") == obj
    assert api.create({"kind": kind, **obj}) == obj
    assert api.patch(kind, "x", {"a": 1}) == obj
    assert api.delete(kind, "x")


def test_without_jobsets_in_the_cluster_it_is_told(api: Api) -> None:
    with pytest.raises(ApiError, match="has no JobSets; launch without jobset=True, or have"):
        api.create({"kind": "JobSet", "metadata": {"name": "x"}})


def test_many_threads_may_ask_at_once(api: Api, stub: Stub) -> None:
    stub.on("GET", f"{PODS}/x", Answer(body=pod("x")))
    with ThreadPoolExecutor(16) as threads:
        found = [*threads.map(lambda _: api.get("Pod", "x"), range(16))]
    assert found == [pod("x")] * 16


# Watches


def change(kind: str, obj: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": obj}


def gone() -> dict[str, Any]:
    return change(
        "ERROR", {"kind": "Status", "code": 410, "message": "too old", "reason": "Expired"}
    )


class Watching:
    """A thread that watches pods, with times that a test may change before."""

    def __init__(self, api: Api) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self.failure: Exception | None = None
        self.cancellation = Cancellation()
        self._api = api
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        try:
            for kind, obj in self._api.watch("Pod", "a=b", cancellation=self.cancellation):
                if kind == "LISTED":
                    continue
                metadata = obj["metadata"]
                self.seen.append((kind, metadata["name"], metadata["resourceVersion"]))
        except ApiError as error:
            self.failure = error

    def stop(self) -> None:
        self.cancellation.cancel()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def watch(api: Api, write: Write) -> Iterator[Callable[..., Watching]]:
    started = list[Watching]()
    with contextlib.ExitStack() as stack:

        def start(*, was_let_in: bool = True, **seconds: float) -> Watching:
            timing = dataclasses.replace(HASTY, **seconds)  # type: ignore[arg-type] # numbers
            own = Api(api._client, "team", timing=timing)
            own._was_let_in = was_let_in
            started.append(Watching(own))
            stack.callback(started[-1].stop)
            return started[-1]

        yield start


Watch = Callable[..., Watching]


def watched(stub: Stub, *answers: Answer) -> None:
    """Has a list and the watches that follow it share their address."""
    stub.on("GET", PODS, *answers)


def versions(stub: Stub) -> list[str | None]:
    """From where each watch began; None for a list."""
    return [each.query.get("resourceVersion") for each in stub.requests]


def test_a_watch_goes_on_where_a_connection_broke(stub: Stub, watch: Watch) -> None:
    watched(
        stub,
        Answer(body=listing(pod("a"), version="5")),
        Answer(lines=[change("MODIFIED", pod("a", "6")), b'{"type": "MODI'], then="breaks"),
        BREAKS,
        Answer(lines=[change("BOOKMARK", {"metadata": {"resourceVersion": "9"}})]),
        Answer(lines=[change("DELETED", pod("a", "10"))], then="hangs"),
    )
    watching = watch()
    expected = [("ADDED", "a", "1"), ("MODIFIED", "a", "6"), ("DELETED", "a", "10")]
    poll_until(lambda: watching.seen == expected)
    assert versions(stub) == [None, "5", "6", "6", "9"]
    assert stub.requests[1].query["watch"] == "true"
    assert stub.requests[1].query["timeoutSeconds"] == "60"


@pytest.mark.parametrize("how", ["event", "answer"])
def test_what_a_server_has_forgotten_is_listed_anew(stub: Stub, watch: Watch, how: str) -> None:
    expired = refusal(410, "Expired", "too old resource version")
    watched(
        stub,
        Answer(body=listing(pod("a"), pod("b"), pod("c"), version="5")),
        Answer(lines=[gone()]) if how == "event" else expired,
        Answer(body=listing(pod("b"), pod("c", "7"), pod("d", "8"), version="9")),
        Answer(lines=[], then="hangs"),
    )
    watching = watch()
    poll_until(lambda: len(watching.seen) == 6)
    assert watching.seen[3:] == [("DELETED", "a", "1"), ("MODIFIED", "c", "7"), ("ADDED", "d", "8")]
    poll_until(lambda: versions(stub) == [None, "5", None, "9"])


def test_what_can_be_listed_but_not_watched_is_asked_for_ever_less_often(
    api: Api, stub: Stub
) -> None:
    expired = refusal(410, "Expired", "too old resource version")
    watched(
        stub,
        *[Answer(body=listing(version="5")), expired] * 4,
        Answer(body=listing(version="5")),
        Answer(lines=[change("ADDED", pod("a", "6")), gone()]),
        *[Answer(body=listing(pod("a", "6"), version="7")), expired],
        Answer(body=listing(pod("a", "6"), pod("b"), version="8")),
        Answer(lines=[], then="hangs"),
    )
    pauses: list[float] = []

    class Counting(Cancellation):
        def wait(self, timeout_s: float) -> bool:
            pauses.append(timeout_s)
            return self.is_set()

    timing = Timing(longest_watch_pause_s=2.0)
    watching = Api(api._client, "team", timing=timing).watch("Pod", cancellation=Counting())
    found = [next(watching) for _ in range(8)]
    assert [kind for kind, _ in found if kind != "LISTED"] == ["ADDED"] * 2
    for pause_s, longest_s in zip(pauses, (0.5, 1.0, 2.0, 2.0, 0.5, 1.0), strict=True):
        assert 0.7 * longest_s <= pause_s <= longest_s


@pytest.mark.parametrize(
    "trouble",
    [
        [refusal(500, "InternalError", "no")] * 5,
        # Twice, and when it is asked whether that is so for all.
        [Answer(body=listing(version="5")), *[refusal(401, "Unauthorized", "Unauthorized")] * 3],
    ],
    ids=["a server that fails for long", "credentials that run out"],
)
def test_a_watch_outlives(stub: Stub, watch: Watch, trouble: list[Answer]) -> None:
    watched(
        stub, *trouble, Answer(body=listing(pod("a"), version="6")), Answer(lines=[], then="hangs")
    )
    watching = watch(attempts=2)
    poll_until(lambda: watching.seen == [("ADDED", "a", "1")])


def test_a_watch_that_says_nothing_is_begun_anew(stub: Stub, watch: Watch) -> None:
    watched(stub, Answer(body=listing(version="5")), Answer(lines=[], then="hangs"))
    watch(watch_silence_s=0.1)
    poll_until(lambda: versions(stub)[:3] == [None, "5", "5"])


def test_a_watch_that_is_not_allowed_says_so(stub: Stub, watch: Watch) -> None:
    watched(stub, refusal(403, "Forbidden", 'User "me" cannot list resource "pods"'))
    watching = watch(was_let_in=False)
    poll_until(lambda: watching.failure is not None)
    assert "we may not list pods" in str(watching.failure)


# Logs


def test_a_log_comes_line_by_line_with_all_bytes(api: Api, stub: Stub) -> None:
    stub.on("GET", f"{PODS}/x/log", Answer(lines=[b"one\r\ntw", b"o\xff\n\nthr", b"ee"]))
    assert list(api.logs("x", "node", tail=4)) == ["one\r", "two\udcff", "", "three"]
    assert stub.requests[-1].query["tailLines"] == "4"


@pytest.mark.parametrize(
    ("then", "options", "asked"),
    [
        ("end", {"follow": True, "since_s": 7}, {"follow": "true", "sinceSeconds": "7"}),
        ("breaks", {"follow": True, "timestamps": True}, {"follow": "true", "timestamps": "true"}),
        ("end", {"whole_lines": True}, {"follow": "false"}),
    ],
)
def test_a_log_leaves_out_what_may_be_cut(
    api: Api, stub: Stub, then: str, options: dict[str, Any], asked: dict[str, str]
) -> None:
    stub.on("GET", f"{PODS}/x/log", Answer(lines=[b"one\ntwo\nthr"], then=then))
    assert list(api.logs("x", "node", **options)) == ["one", "two"]
    assert asked.items() <= stub.requests[-1].query.items()


def test_a_log_that_is_not_there_yet_says_why(api: Api, stub: Stub) -> None:
    said = 'container "node" in pod "x" is waiting to start: ContainerCreating'
    stub.on("GET", f"{PODS}/x/log", refusal(400, "BadRequest", said))
    with pytest.raises(ApiError, match="waiting to start") as caught:
        list(api.logs("x", "node", follow=True))
    assert caught.value.status == 400


def test_a_log_that_says_nothing_ends(stub: Stub, write: Write) -> None:
    write(stub.url)
    stub.on("GET", f"{PODS}/x/log", Answer(lines=[b"one\n"], then="hangs"))
    with connected(dataclasses.replace(HASTY, log_silence_s=0.3)) as api:
        # Even its first line may come too late on a machine that is busy.
        poll_until(lambda: list(api.logs("x", "node", follow=True)) == ["one"])
