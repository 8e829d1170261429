"""Whole objects: what all have in common, and who checks the rest of each kind."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launchers._kubernetes.checks.jobs import check_job, check_job_set
from launchers._kubernetes.checks.metadata import check_metadata
from launchers._kubernetes.checks.network import check_network_policy, check_service
from launchers._kubernetes.checks.places import Place, Rule, is_map, meant, shown
from launchers._kubernetes.checks.secrets import check_secret
from launchers._kubernetes.checks.structure import check_structure, check_structure_of_job_set
from launchers._kubernetes.checks.values import service_name, subdomain

#: What etcd stores as one value, by default.
_OBJECT_BYTES = 3 << 19


@dataclass(frozen=True)
class _Kind:
    """How objects of a kind are checked.

    Attributes:
        version: Their API version.
        model: Their model in the official client; empty: a JobSet, of which it has none.
        check: Rules of this kind.
        name: What their names obey.
    """

    version: str
    model: str
    check: Callable[[Place], None]
    name: Rule = subdomain


_KINDS = {
    "Job": _Kind("batch/v1", "V1Job", check_job),
    "JobSet": _Kind("jobset.x-k8s.io/v1alpha2", "", check_job_set, service_name),
    "NetworkPolicy": _Kind("networking.k8s.io/v1", "V1NetworkPolicy", check_network_policy),
    "Secret": _Kind("v1", "V1Secret", check_secret),
    "Service": _Kind("v1", "V1Service", check_service, service_name),
}


def mistakes(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what a real API server would refuse in objects to be created.

    Some things that it lets pass are mistakes here all the same, because no pod would ever start: a
    root user where none is allowed, for example. Whether what is named exists (a claim, a class, a
    service account) only the server knows.

    Args:
        objects: Jobs, JobSets, Services, Secrets and NetworkPolicies as plain JSON. Anything else
            that JSON can say is a mistake, never an error.

    Returns:
        One text for each mistake: the object, the field, what is wrong and what to do; in order of
        the objects.
    """
    found: list[str] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for index, each in enumerate(objects):
        root = Place(each, "", [])
        kind, meta = root["kind"].text, root["metadata"]
        name = meta["name"].text
        identity = kind, meta["namespace"].text, name
        seen[identity] += 1
        if name and seen[identity] == 2:
            meta["name"].wrong("given to two objects; give each its own")
        _check(root)
        called = f"{kind or 'object'} {_plain(name) or f'#{index}'}"
        found += [f"{called}: {what}" for what in dict.fromkeys(root.found)]
    return found


def _check(root: Place) -> None:
    if not is_map(root.value):
        root.wrong(f"expected an object, got {shown(root.value)}")
        return
    kind = _KINDS.get(root["kind"].text)
    if kind is None:
        name = root["kind"].text
        root["kind"].wrong(
            f"{shown(name)} is unknown; {meant(name, sorted(_KINDS))}"
            if name
            else "missing; give the kind of the object"
        )
        return
    version, meta = root["apiVersion"], root["metadata"]
    if version.value != kind.version:
        version.wrong(f"expected {kind.version!r}, got {shown(version.value)}")
    if kind.model:
        check_structure(root, kind.model)
    else:
        check_structure_of_job_set(root)
    if not meta["name"].text:
        meta["name"].wrong("missing; name the object")
    meta["name"].obey(kind.name)
    for field in meta.select("{managedFields,resourceVersion}"):
        if field.value:
            field.wrong("must not be given for an object to be created")
    check_metadata(meta)
    size = len(json.dumps(root.value, default=str, skipkeys=True))
    # Secrets have a limit of their own, below this one.
    if size > _OBJECT_BYTES and root["kind"].text != "Secret":
        root.wrong(f"has {size} bytes; an API server stores at most {_OBJECT_BYTES}")
    kind.check(root)


def _plain(name: str) -> str:
    """A name for messages, whatever it holds."""
    return name if len(name) <= 80 and name.isprintable() else shown(name)
