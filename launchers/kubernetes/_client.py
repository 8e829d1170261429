"""Requests to a Kubernetes API server, with errors that say what to do.

Objects are plain JSON objects, as in a manifest. This module knows nothing of programs.
"""

import contextlib
import ipaddress
import json
import math
import os
import random
import re
import secrets
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from launchers.kubernetes._agreed import CREATED_BY_ANNOTATION
from launchers.kubernetes._timing import DEFAULT, Timing
from launchpad_lite.errors import LaunchError, MissingExtraError

Json = dict[str, Any]
Objects = list[Json]
T = TypeVar("T")
#: `LISTED` is about no object: it says that all existing objects were reported.
ChangeKind = Literal["ADDED", "MODIFIED", "DELETED", "LISTED"]

_CONNECT_S, _ANSWER_S = 10.0, 30.0
#: The most seconds between two attempts for which a server may ask.
_LONGEST_ASKED_S = 30.0
#: Seconds after which a server ends a watch.
_WATCH_S = 60
#: Statuses after which the same request may succeed. Except after 429, it may have succeeded
#: already.
_PASSING = frozenset({429, 500, 502, 503, 504})
_METHODS = {"create": "POST", "patch": "PATCH", "delete": "DELETE"}
#: The most characters shown of an answer that does not come from Kubernetes, but from a proxy.
_MOST_SAID = 500
_ONE = {"limit": 1}
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
#: Fields of a kubeconfig's user that impersonate, beside `as`.
_UNSERVED = ("as-uid", "as-groups", "as-user-extra")
#: Kinds of objects: their API, and their name in addresses and in the rules of a Role.
KINDS = {
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "Secret": ("v1", "secrets"),
    "Event": ("v1", "events"),
    "Job": ("batch/v1", "jobs"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", "jobsets"),
}


class ApiError(LaunchError):
    """The API server refused a request, or could not be asked.

    Attributes:
        status: HTTP status; None if there was no answer.
        reason: Kubernetes' word for it, like `AlreadyExists`.
        said: The server's own words: a text for each field that it named.
        attempts: How often the request was sent; 0 if that is not known.
        asked_s: The pause that the server asks for.
        is_final: Whether only this request is refused: a server that has just started refuses all.
    """

    def __init__(
        self, message: str, status: int | None = None, reason: str = "", said: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.said = said
        self.attempts = 0
        self.asked_s = 0.0
        self.is_final = False


def created_by(obj: Mapping[str, Any]) -> str | None:
    """Returns the word with which an object was created by `Api.create`; None if it was not."""
    annotations: Mapping[str, str] = obj["metadata"].get("annotations") or {}
    return annotations.get(CREATED_BY_ANNOTATION)


class Cancellation(threading.Event):
    """Ends watches and logs that other threads read. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._open: set[Any] = set()

    def cancel(self) -> None:
        """Ends all that is read under it, now and later."""
        with self._lock:
            self.set()
            for response in self._open:
                _shut(response)

    @contextlib.contextmanager
    def guarding(self, response: Any) -> Iterator[None]:
        """Makes a response end when this is cancelled."""
        with self._lock:
            if self.is_set():
                _shut(response)
            self._open.add(response)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(response)


def _shut(response: Any) -> None:
    """Ends a response that another thread reads: `close` would wait for that thread."""
    sock = getattr(getattr(response, "connection", None), "sock", None)
    if sock is not None:
        with contextlib.suppress(OSError):  # it has ended by itself
            sock.shutdown(socket.SHUT_RDWR)


class Api:
    """A namespace of a cluster. Thread-safe.

    A request that may succeed later is sent again for some seconds: when the server is busy,
    restarts or cannot be reached for a moment. Each request has a time limit. If it fails for good,
    it raises ApiError.

    The official client finds the cluster, authenticates and holds the connections. Its methods for
    kinds of objects are not used: they know only the fields of their own release, and leave out
    others, which the cluster may know.
    """

    def __init__(self, client: Any, namespace: str, *, timing: Timing = DEFAULT) -> None:
        """Takes over a `kubernetes.client.ApiClient`."""
        self._client = client
        self._timing = timing
        # The pool of connections is thread-safe; the code that renews tokens is not.
        self._credentials = threading.Lock()
        self._certificates: list[tuple[str, float]] | None = None
        self._was_let_in = False
        self.server: str = client.configuration.host
        self.namespace = namespace

    @classmethod
    def connect(
        cls, context: str | None = None, namespace: str | None = None, timing: Timing = DEFAULT
    ) -> "Api":
        """Returns the cluster that kubectl would speak with, once it has answered.

        Raises:
            MissingExtraError: The official client is not installed.
            ApiError: The server does not answer, or does not let us list pods.
            LaunchError: There is no usable configuration.
        """
        try:
            import kubernetes.client
            import kubernetes.config
        except ImportError as error:
            raise MissingExtraError(
                "the launcher 'kubernetes' needs the official client: pip install "
                "'launchpad-lite[kubernetes]'"
            ) from error
        configuration = kubernetes.client.Configuration()
        own_namespace, proxy, impersonated = _configure(configuration, context)
        # Releases of the package differ in how they choose a proxy, and some choose none.
        configuration.proxy = proxy or _proxy_from_environment(configuration.host)
        configuration.no_proxy = None
        # `_try` repeats requests. The connection pool would repeat some of them silently, as often as
        # the server says.
        configuration.retries = False
        # Watches are idle for long, and routers on the way drop idle connections.
        configuration.keep_alive = True
        # One for each thread: the pool throws further connections away, with a warning.
        configuration.connection_pool_maxsize = 32
        try:
            client = kubernetes.client.ApiClient(configuration)
        except Exception as error:
            if configuration.proxy is None:
                raise
            # The proxy has an unknown scheme, or is no URL. Releases raise different errors for that.
            without_login = re.sub(r"//[^/@]*@", "//", str(configuration.proxy))
            raise LaunchError(
                f"the proxy {without_login} to the API server "
                f"{configuration.host} cannot be used: {_plain(error)}. It is the proxy-url of the "
                "kubeconfig, or comes from HTTPS_PROXY"
            ) from error
        if impersonated:
            client.default_headers["Impersonate-User"] = impersonated
        api = cls(client, namespace or own_namespace, timing=timing)
        try:
            api._demand("list", "Pod", query=_ONE)
            api._was_let_in = True
        except BaseException:
            api.close()
            raise
        return api

    def close(self) -> None:
        """Closes all idle connections. Later requests open new ones."""
        # The client only clears its pools. That leaves idle connections to the garbage collector, and
        # keeps those that are in use.
        pools = self._client.rest_client.pool_manager.pools
        for pool in [pools.get(key) for key in pools.keys()]:  # noqa: SIM118 - no dict
            if pool is not None:
                pool.close()
        pools.clear()
        self._client.close()

    # Objects

    def create(self, obj: Mapping[str, Any], *, author: str | None = None) -> Json:
        """Creates an object and returns it as the server has it.

        The server refuses unknown fields. If an answer gets lost, this reads the object to find out
        whether the lost attempt created it. If we may not read an object that has an owner, this
        assumes so, and returns the object as it was sent. `author` is the word that `created_by`
        returns later, by default a unique one.
        """
        kind, meta = obj["kind"], obj["metadata"]
        author = author or secrets.token_hex(16)
        annotations = {**(meta.get("annotations") or {}), CREATED_BY_ANNOTATION: author}
        signed = {**obj, "metadata": {**meta, "annotations": annotations}}
        query = {"fieldValidation": "Strict"}
        try:
            return self._demand("create", kind, meta["name"], query=query, body=signed)
        except ApiError as error:
            if error.reason != "AlreadyExists" or error.attempts == 1:
                raise
            # An earlier attempt may have succeeded, and only its answer got lost.
            try:
                found = self.get(kind, meta["name"])
            except ApiError as refused:
                if refused.status == 403 and meta.get("ownerReferences"):
                    return signed
                raise error from refused
            if found is None or created_by(found) != author:
                raise
            return found

    def rehearse(self, obj: Mapping[str, Any]) -> None:
        """Has the server check an object without creating it; raises ApiError if it refuses."""
        query = {"fieldValidation": "Strict", "dryRun": "All"}
        self._demand("create", obj["kind"], obj["metadata"]["name"], query=query, body=obj)

    def get(self, kind: str, name: str) -> Json | None:
        try:
            return self._demand("get", kind, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, selector: str = "", *, patience_s: float = math.inf) -> Objects:
        """Returns all objects of a kind. After `patience_s` seconds nothing is repeated."""
        chosen = {"labelSelector": selector} if selector else {}
        items, _ = self._list(kind, chosen, patience_s=patience_s)
        return items

    def patch(
        self, kind: str, name: str, body: Mapping[str, Any], *, patience_s: float = math.inf
    ) -> Json:
        """Changes fields of an object: maps are merged, None removes. `patience_s` as for `list`."""
        return self._demand("patch", kind, name, body=body, patience_s=patience_s)

    def delete(
        self,
        kind: str,
        name: str,
        *,
        grace_s: int | None = None,
        uid: str | None = None,
        patience_s: float = math.inf,
    ) -> bool:
        """Deletes an object and, in the background, what it owns; returns whether it existed.

        A pod has `grace_s` to end; by default what it says itself. With a `uid`, only the object
        that has it is deleted.
        """
        # Not parameters: only a body can carry a precondition.
        options: Json = {"kind": "DeleteOptions", "apiVersion": "v1"}
        options["propagationPolicy"] = "Background"
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self._demand("delete", kind, name, body=options, patience_s=patience_s)
        except ApiError as error:
            if error.status == 404 or (uid is not None and error.reason == "Conflict"):
                return False
            raise
        return True

    # Streams

    def watch(
        self, kind: str, selector: str = "", *, fields: str = "", cancellation: Cancellation
    ) -> Iterator[tuple[ChangeKind, Json]]:
        """Yields the existing objects of a kind as `ADDED`, then `LISTED`, then each change.

        The watch continues after lost connections, restarts of the server and expired credentials,
        however long they take, until it is cancelled. It then yields what has changed meanwhile,
        though not each step. It raises ApiError only if the server refuses from the beginning that
        we list or watch them.
        """
        selectors = {"labelSelector": selector, "fieldSelector": fields}
        chosen = {name: value for name, value in selectors.items() if value}
        known: dict[str, Json] = {}
        version: str | None = None
        pause_s = self._timing.watch_pause_s
        was_watched = False
        while not cancellation.is_set():
            try:
                if version is None:
                    items, version = self._list(kind, chosen, cancellation=cancellation)
                    yield from _changes(known, items)
                    yield "LISTED", {"kind": kind}
                for change, obj in self._watch_once(kind, chosen, version, cancellation):
                    # Only now: a successful list does not prove that a watch will succeed.
                    pause_s = self._timing.watch_pause_s
                    version = obj["metadata"]["resourceVersion"]
                    if change == "DELETED":
                        known.pop(_uid(obj), None)
                    elif change in ("ADDED", "MODIFIED"):
                        known[_uid(obj)] = obj
                    else:
                        continue  # a bookmark
                    was_watched = True
                    yield change, obj
                was_watched = True
                pause_s = self._timing.watch_pause_s
            except ApiError as error:
                if not was_watched and (error.is_final or error.status in (400, 404, 405)):
                    raise
                if error.status is not None:
                    version = None  # most often 410: the server has dropped older changes
                if cancellation.wait(pause_s * random.uniform(0.7, 1.0)):  # noqa: S311 - no secret
                    return
                pause_s = min(pause_s * 2, self._timing.longest_watch_pause_s)

    def logs(
        self,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        since_s: int | None = None,
        tail: int | None = None,
        timestamps: bool = False,
        whole_lines: bool = False,
        cancellation: Cancellation | None = None,
    ) -> Iterator[str]:
        """Yields what a container printed, line by line; other bytes as `surrogateescape` has them.

        With `follow`, it waits for what is printed later, and ends with the container, when it is
        cancelled, or when the connection breaks; then call again. An unfinished last line, which
        may be incomplete, is left out then, and always with `whole_lines`. `since_s` leaves out
        what is older, `tail` all but the last lines.
        """
        query: Json = {"container": container}
        query |= {"follow": str(follow).lower(), "timestamps": str(timestamps).lower()}
        if since_s is not None:
            query["sinceSeconds"] = max(1, since_s)
        if tail is not None:
            query["tailLines"] = tail
        request = _ApiRequest("get", self.namespace, "Pod", pod, "log", query)
        silence_s = self._timing.log_silence_s
        for line in self._lines(request, silence_s, cancellation or Cancellation()):
            if line.endswith(b"\n") or not (follow or whole_lines):
                yield line.removesuffix(b"\n").decode(errors="surrogateescape")

    def _watch_once(
        self, kind: str, chosen: Json, version: str, cancellation: Cancellation
    ) -> Iterator[tuple[Any, Json]]:
        """Yields changes until the server ends the watch, or its connection breaks."""
        query = {
            **chosen,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": _WATCH_S,
        }
        request = _ApiRequest("watch", self.namespace, kind, query=query)
        began = time.monotonic()
        for line in self._lines(request, self._timing.watch_silence_s, cancellation):
            try:
                found = json.loads(line)
                change, obj = found["type"], found["object"]
            except (ValueError, KeyError, TypeError):
                break  # the end of a connection that broke
            if change == "ERROR":
                status = obj.get("code", 500)
                raise ApiError(str(obj.get("message", "")), status, str(obj.get("reason", "")))
            yield change, obj
        if not cancellation.is_set() and time.monotonic() < began + 1:
            # A proxy on the way breaks each connection at once: pause, to spare the server.
            cancellation.wait(self._timing.watch_pause_s)

    def _lines(
        self, request: "_ApiRequest", silence_s: float, cancellation: Cancellation
    ) -> Iterator[bytes]:
        """Yields lines with their ends as they come, until the stream ends or breaks."""
        import urllib3.exceptions

        response = self._try(request, lambda: self._send(request, silence_s), cancellation)
        with cancellation.guarding(response):
            try:
                for line in response:
                    yield line
                    if cancellation.is_set():
                        return
            except (urllib3.exceptions.HTTPError, OSError, ValueError):
                return  # broken, silent for too long, or shut while it was read
            finally:
                response.close()

    # Requests

    def _list(self, kind: str, chosen: Json, **how_long: Any) -> tuple[Objects, str]:
        found = self._demand("list", kind, query=chosen, **how_long)
        items: Objects = found.get("items") or []
        for item in items:  # a list states kind and version once, not in each item
            item.setdefault("kind", kind)
            item.setdefault("apiVersion", KINDS[kind][0])
        return items, found["metadata"].get("resourceVersion", "")

    def _demand(
        self,
        verb: str,
        kind: str,
        name: str = "",
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        cancellation: Cancellation | None = None,
        patience_s: float = math.inf,
    ) -> Json:
        request = _ApiRequest(verb, self.namespace, kind, name, query=query, body=body)
        return self._try(
            request, lambda: json.loads(self._send(request).data), cancellation, patience_s
        )

    def _send(self, request: "_ApiRequest", silence_s: float = _ANSWER_S) -> Any:
        """Sends a request; returns the response with its body unread, or raises ApiError."""
        import urllib3

        address = self.server + request.path
        if request.query:
            address += f"?{urlencode(request.query)}"
        with self._credentials:
            own = self._client.configuration
            # Releases differ in the name: 36.0.0 stores by one, and its `auth_settings` wants the other.
            names = [each for each in ("BearerToken", "authorization") if each in own.api_key]
            login = own.get_api_key_with_prefix(names[0]) if names else None
            self._read_certificates()
        headers = dict(self._client.default_headers, Accept="application/json")
        if login:
            headers["authorization"] = login
        body = None
        if request.body is not None:
            body = json.dumps(request.body).encode()
            kind = "merge-patch+json" if request.method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        response = self._client.rest_client.pool_manager.request(
            request.method,
            address,
            body=body,
            headers=headers,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=silence_s),
            preload_content=False,
        )
        if not 200 <= response.status < 300:
            raise self._refusal(response, request)
        return response

    def _read_certificates(self) -> None:
        """Makes new connections use what the files of certificates hold now.

        The package writes inline certificates of a kubeconfig to temporary files. If a clean-up
        deletes such a file, what was read stays in use. A certificate that is a file may be renewed
        in place.
        """
        import urllib3.exceptions
        from urllib3.util import ssl_ as urllib3_ssl

        own, pools = self._client.configuration, self._client.rest_client.pool_manager
        if not self.server.startswith("https:"):
            return
        try:
            files = [file for file in (own.ssl_ca_cert, own.cert_file, own.key_file) if file]
            state = [(file, Path(file).stat().st_mtime) for file in files]
            if state == self._certificates:
                return
            checks = ssl.CERT_REQUIRED if own.verify_ssl else ssl.CERT_NONE
            context = urllib3_ssl.create_urllib3_context(cert_reqs=checks)
            # Set since Python 3.13. It demands extensions that the authorities of many clusters lack.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if own.ssl_ca_cert:
                context.load_verify_locations(own.ssl_ca_cert)
            else:
                context.load_default_certs()  # urllib3 does so for its own contexts only
            if own.cert_file:
                # Without a password OpenSSL would ask the terminal for that of an encrypted key.
                context.load_cert_chain(own.cert_file, own.key_file, password="")
        except OSError as error:
            if self._certificates is None:
                raise urllib3.exceptions.SSLError(error) from error
            return  # the file is deleted, or half written
        options = pools.connection_pool_kw
        options["ssl_context"] = context
        # The pool would read these files as well.
        for name in ("cert_file", "key_file", *(["ca_certs"] if own.ssl_ca_cert else [])):
            options.pop(name, None)
        if proxy := options.get("_proxy_config"):
            # The package has the cluster's authority vouch for a proxy, as kubectl does.
            options["_proxy_config"] = proxy._replace(ssl_context=context)
        self._certificates = state

    def _try(
        self,
        request: "_ApiRequest",
        attempt: Callable[[], T],
        cancellation: Cancellation | None = None,
        patience_s: float = math.inf,
    ) -> T:
        """Sends a request until there is an answer that will not change by itself."""
        import kubernetes.config
        import urllib3.exceptions

        attempts = 0
        pause_s = self._timing.request_pause_s
        give_up_at = time.monotonic() + patience_s
        while True:
            attempts += 1
            try:
                return attempt()
            except ApiError as refused:
                failure = refused
                passes = failure.status in _PASSING or failure.reason == "Conflict"
                if failure.status in (401, 403):
                    # Asked from the second attempt on: the server may have loaded its roles since the first.
                    passes = self._was_let_in and (attempts == 1 or self._refuses_all())
                    failure.is_final = not passes
            except urllib3.exceptions.SSLError as error:
                failure = ApiError(
                    f"{request.attempted}: no secure connection to the API server {self.server}: "
                    f"{_plain(error)}. Has the kubeconfig the right certificate-authority?"
                )
                passes = "CERTIFICATE" not in str(error).upper()
            except (urllib3.exceptions.HTTPError, OSError, json.JSONDecodeError) as error:
                failure = ApiError(
                    f"{request.attempted}: the API server {self.server} does not answer: "
                    f"{_plain(error)}. Is the address right, and does this machine reach it?"
                )
                passes = True
            except kubernetes.config.ConfigException as error:
                raise ApiError(
                    f"{request.attempted}: the kubeconfig's way to get credentials failed: "
                    f"{_plain(error)}. Log in again"
                ) from error
            failure.attempts = attempts
            is_last = attempts >= self._timing.attempts or time.monotonic() >= give_up_at
            if not passes or is_last:
                raise failure
            # Random, so that the launchers of a cluster do not all try at the same time.
            own_s = pause_s * random.uniform(0.7, 1.0)  # noqa: S311 - no secret
            wait_s = min(failure.asked_s, _LONGEST_ASKED_S) or own_s
            if cancellation is None:
                time.sleep(wait_s)
            elif cancellation.wait(wait_s):
                raise failure
            pause_s = min(pause_s * 2, self._timing.longest_request_pause_s)

    def _refuses_all(self) -> bool:
        """Returns whether the server refuses even what it allowed before, as until its roles are loaded."""
        import urllib3.exceptions

        try:
            self._send(_ApiRequest("list", self.namespace, "Pod", query=_ONE))
        except ApiError as refused:
            return refused.status in (401, 403)
        except (urllib3.exceptions.HTTPError, OSError):
            return True
        return False

    def _refusal(self, response: Any, request: "_ApiRequest") -> ApiError:
        status, body = response.status, response.data
        try:
            said = json.loads(body)
            message, reason = str(said["message"]), str(said.get("reason", ""))
            causes = (said.get("details") or {}).get("causes") or ()
            of_fields = tuple(
                ": ".join(filter(None, (each.get("field"), each.get("message")))) for each in causes
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            message, reason = _flat(body.decode(errors="replace"))[:_MOST_SAID], ""
            of_fields = ()
        if status == 401 or (status == 403 and "system:anonymous" in message):
            text = (
                f"{request.attempted}: the API server {self.server} does not know who we are "
                f"({message}). Log in again, or name another context= of the kubeconfig. Does "
                "`kubectl auth whoami` work?"
            )
        elif status == 403 and " cannot " in message:
            rule = {"apiGroups": [request.group], "resources": [request.resource]}
            rule["verbs"] = [request.verb]
            text = (
                f"we may not {request.verb} {request.resource} in namespace {self.namespace!r}: "
                f"{message}. A Role of this namespace must have the rule {json.dumps(rule)}"
            )
        elif status == 404 and request.verb == "create" and request.group.startswith("jobset."):
            text = (
                f"the cluster {self.server} has no JobSets; launch without jobset=True, or have them "
                "installed (https://jobset.sigs.k8s.io)"
            )
        else:
            text = f"{request.attempted} in namespace {self.namespace!r}: {message} (HTTP {status})"
        failure = ApiError(text, status, reason, of_fields or (message,))
        with contextlib.suppress(ValueError):  # a date
            failure.asked_s = max(0.0, float(response.headers.get("Retry-After", 0)))
        return failure


@dataclass(frozen=True)
class _ApiRequest:
    verb: str
    namespace: str
    kind: str
    name: str = ""
    part: str = ""
    query: Mapping[str, Any] | None = None
    body: Mapping[str, Any] | None = None

    @property
    def method(self) -> str:
        return _METHODS.get(self.verb, "GET")

    @property
    def group(self) -> str:
        """Of the API, as rules of a Role have it; empty for the core."""
        return KINDS[self.kind][0].rpartition("/")[0]

    @property
    def resource(self) -> str:
        return "/".join(filter(None, (KINDS[self.kind][1], self.part)))

    @property
    def path(self) -> str:
        api, plural = KINDS[self.kind]
        name = "" if self.verb == "create" else self.name
        root = "apis" if self.group else "api"
        parts = (root, api, "namespaces", self.namespace, plural, name, self.part)
        return "".join(f"/{quote(each)}" for each in parts if each)

    @property
    def attempted(self) -> str:
        return f"cannot {self.verb} {self.kind} {self.name}".rstrip()


def _configure(configuration: Any, context: str | None) -> tuple[str, str | None, str | None]:
    """Sets where the cluster is, and who we are.

    Returns the namespace, the proxy if the kubeconfig names one, and the user to impersonate.
    """
    import kubernetes.config

    loader: Any = kubernetes.config  # has no types
    # Read now, as kubectl does: the package keeps the value from when it was imported.
    files = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config"))
    paths = [Path(each).expanduser() for each in files.split(os.pathsep) if each]
    # kubectl ignores empty files. A pipe has no size, and can be read once.
    full = [path for path in paths if path.exists() and (path.stat().st_size or not path.is_file())]
    if full:
        try:
            # Like `load_kube_config`, which does not return the context's namespace.
            merged = loader.kube_config.KubeConfigMerger(os.pathsep.join(map(str, full)))
            if context is None:
                # kubectl takes the first current-context of the files, the package the last one.
                every = merged.config_files.values()
                named = (each.get("current-context") for each in every)
                context = next(filter(None, named), None)
            found = loader.kube_config._get_kube_config_loader(
                config_dict=merged.config, active_context=context
            )
            found.load_and_set(configuration)
            current = found.current_context
            user = found._user.value if found._user else {}
            proxy = found._cluster.value.get("proxy-url")
            unserved = [each for each in _UNSERVED if user.get(each)]
        except Exception as error:
            # Any exception is possible, because the user's file may hold anything.
            raise LaunchError(
                f"the kubeconfig {files} cannot be used: {type(error).__name__}: {_plain(error)}. "
                "Does `kubectl get pods` work, with the same KUBECONFIG and context?"
            ) from error
        if unserved:
            raise LaunchError(
                f"the kubeconfig {files} has its user impersonate others by {', '.join(unserved)}; "
                "of these ways only `as` is served"
            )
        return str(current["context"].get("namespace") or "default"), proxy, user.get("as")
    if context is not None:
        raise LaunchError(
            f"there is no kubeconfig that could have the context {context!r}: {files} is not there"
        )
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise LaunchError(
            f"no Kubernetes cluster is known: there is no kubeconfig in {files}, and this is no pod "
            "of a cluster. Set KUBECONFIG, or get a kubeconfig from the administrator of the cluster"
        )
    try:
        loader.load_incluster_config(configuration)
    except (loader.ConfigException, OSError) as error:
        raise LaunchError(
            f"this pod cannot speak with its cluster: {error}. Give it a service account that may "
            "create Jobs, with automountServiceAccountToken, or a kubeconfig"
        ) from error
    with contextlib.suppress(OSError):
        return _NAMESPACE_FILE.read_text().strip() or "default", None, None
    return "default", None, None


def _proxy_from_environment(server: str) -> str | None:
    """Returns the proxy that kubectl would take; None if it would connect by itself."""
    variables = urllib.request.getproxies_environment()
    try:
        url = urlsplit(server)
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError:
        return None  # requests will say so
    proxy, host = variables.get(url.scheme), url.hostname or ""
    rules = [each.strip().lower().removeprefix("*.") for each in variables.get("no", "").split(",")]
    bypass = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined] # typeshed lacks it
    if not proxy or host == "localhost" or bypass(f"{host}:{port}", {"no": ",".join(rules)}):
        return None
    with contextlib.suppress(ValueError):  # the host is a name
        address = ipaddress.ip_address(host)
        for rule in ("127.0.0.0/8", "::1", *rules):
            with contextlib.suppress(ValueError):  # the rule is a name
                if address in ipaddress.ip_network(rule, strict=False):
                    return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _changes(known: dict[str, Json], items: Objects) -> Iterator[tuple[ChangeKind, Json]]:
    """Brings what is known up to date, and yields what differs."""
    now = {_uid(item): item for item in items}
    for uid in [*known]:
        if uid not in now:
            yield "DELETED", known.pop(uid)
    for uid, item in now.items():
        before = known.get(uid)
        if before is None or _version(before) != _version(item):
            known[uid] = item
            yield ("ADDED" if before is None else "MODIFIED"), item


def _uid(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"]["uid"])


def _version(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"].get("resourceVersion"))


def _plain(error: BaseException) -> str:
    """Returns what went wrong, without the objects that it happened to."""
    return re.sub(r"<[^<>]*>: ?|\w*Connection\(host=[^)]*\): ?", "", _flat(str(error)))


def _flat(text: str) -> str:
    return " ".join(text.split())
