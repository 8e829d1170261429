"""How a launcher reaches a cluster: its kubeconfig, and requests to which something happens."""

import contextlib
import copy
import functools
import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers.kubernetes import KubernetesLauncher
from launchers.kubernetes._client import Api
from launchers.kubernetes._timing import Timing

Fault = Callable[[], None]


#: Nothing waits for more than moments until it is tried again.
HASTY = Timing(request_pause_s=0.01, longest_request_pause_s=0.02, watch_pause_s=0.01, look_s=0.01)


class HastyLauncher(KubernetesLauncher):
    """Tries again at once."""

    __init__ = functools.partialmethod(KubernetesLauncher.__init__, timing=HASTY)


@contextlib.contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[str]:
    """Has a server answer, in a thread; yields its address."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    with server:
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def documented_role() -> frozenset[tuple[str, str]]:
    """What the documentation says that users need but for JobSets, as verb and resource."""
    import yaml

    text = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (found,) = (
        each for block in blocks for each in yaml.safe_load_all(block) if each["kind"] == "Role"
    )
    return frozenset(
        (verb, resource)
        for rule in found["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


def record(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the objects that are created from now on, as they are asked for."""
    create, made = Api.create, list[dict[str, Any]]()

    def create_and_note(api: Api, obj: dict[str, Any], **how: Any) -> dict[str, Any]:
        made.append(copy.deepcopy(obj))
        return create(api, obj, **how)

    monkeypatch.setattr(Api, "create", create_and_note)
    return made


def disturb(
    monkeypatch: pytest.MonkeyPatch, *, before: Fault | None = None, after: Fault | None = None
) -> list[str]:
    """Has something happen at each request before it is sent, and when it was answered.

    Returns:
        The requests, as "POST jobs demo", the latest last; those that only try it as "TRY jobs demo".
    """
    send, seen = Api._send, list[str]()

    def disturbed(api: Api, request: Any, *rest: Any) -> Any:
        words = request.path.split("/namespaces/team/")[-1].split("/")
        if request.method == "POST":
            words.append(request.body["metadata"]["name"])
        is_tried = "dryRun" in (request.query or {})
        seen.append(" ".join(["TRY" if is_tried else request.method, *words]))
        if before is not None:
            before()
        try:
            response = send(api, request, *rest)
            assert response.data  # it is kept
            return response
        finally:
            if after is not None:
                after()

    monkeypatch.setattr(Api, "_send", disturbed)
    return seen
