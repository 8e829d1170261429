"""Objects of another structure, which the API server refuses, and the defaults that it fills in.

Structure comes from the published schemas of the newest release that kubernetes-validate knows. What
schemas cannot say passes here.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.beds.kubernetes.store import RESOURCES, ApiError, Object

_QUANTITY = re.compile(r"([+-]?[0-9.]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_SUFFIXES = {
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    "n": Decimal(10) ** -9,
    "u": Decimal(10) ** -6,
    "m": Decimal(10) ** -3,
}
_INT32 = 2**31 - 1


def quantity(text: str | float) -> Decimal:
    """The number that a quantity means.

    Raises:
        ValueError: It is none.
    """
    found = _QUANTITY.fullmatch(str(text))
    if not found:
        raise ValueError(f"{text!r} is no quantity")
    number, suffix = found.groups()
    if suffix and suffix[0] in "eE" and suffix[1:]:
        return Decimal(number + suffix)
    return Decimal(number) * _SUFFIXES.get(suffix or "", Decimal(1))


@functools.cache
def _schema(name: str) -> Any:
    import jsonschema  # type: ignore[import-untyped]
    import kubernetes_validate  # type: ignore[import-untyped]
    from referencing import Registry, Resource

    newest = kubernetes_validate.latest_version()
    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    folder = schemas / f"v{newest}-local-strict"
    definitions = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    schema = json.loads((folder / f"{name}.json").read_text())
    registry: Any = definitions @ Registry()
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


def check_structure(resource: str, item: Mapping[str, Any]) -> None:
    """Raises ApiError for unknown fields, wrong types and missing fields."""
    known = RESOURCES[resource]
    if item.get("apiVersion") != known.api_version or item.get("kind") != known.kind:
        raise ApiError(
            400,
            "BadRequest",
            f"the API version in the data ({item.get('apiVersion')}) does not match the expected "
            f"API version ({known.api_version}), or the kind {item.get('kind')} does not",
        )
    if resource == "jobsets":  # its schema is not among the published ones
        return
    group = known.group.split(".")[0]
    name = "-".join(filter(None, [known.kind.lower(), group, known.version]))
    for mistake in _schema(name).iter_errors(item):
        path = _path(mistake.path)
        verb = "unknown field" if mistake.validator == "additionalProperties" else "wrong type"
        raise ApiError(
            400,
            "BadRequest",
            f'{known.kind} in version "{known.version}" cannot be handled as a {known.kind}: '
            f'strict decoding error: {verb} "{path}": {mistake.message[:300]}',
        )


def fill(resource: str, item: Object) -> None:
    """Fills in the defaults that controllers and the kubelet read."""
    if resource == "pods":
        _fill_pod(item)
        item["status"] = {"phase": "Pending", "qosClass": "Burstable"}
    elif resource == "jobs":
        _fill_job(item)
    elif resource == "services":
        spec = item["spec"]
        spec.setdefault("type", "ClusterIP")
        for port in spec.get("ports") or []:
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port["port"])
        item["status"] = {"loadBalancer": {}}
    elif resource == "secrets":
        item.setdefault("type", "Opaque")
    elif resource == "jobsets":
        item["spec"].setdefault("network", {}).setdefault("enableDNSHostnames", True)
        item["spec"]["network"].setdefault("publishNotReadyAddresses", True)
        for one in item["spec"].get("replicatedJobs") or []:
            one.setdefault("replicas", 1)
            spec = one["template"]["spec"]
            spec.setdefault("completionMode", "Indexed")
            spec["template"]["spec"].setdefault("restartPolicy", "OnFailure")


def fill_identity(resource: str, item: Object) -> None:
    """What a job gets from its uid."""
    if resource != "jobs":
        return
    uid, name = item["metadata"]["uid"], item["metadata"]["name"]
    item["spec"]["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
    labels = item["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {})
    for prefix in ("", "batch.kubernetes.io/"):
        labels[f"{prefix}controller-uid"] = uid
        labels[f"{prefix}job-name"] = name


def _fill_pod(pod: Object) -> None:
    spec = pod["spec"]
    for field, value in {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "serviceAccountName": "default",
        "schedulerName": "default-scheduler",
        "enableServiceLinks": True,
        "securityContext": {},
    }.items():
        if spec.get(field) is None:
            spec[field] = value
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        resources = container.setdefault("resources", {})
        for name, limit in (resources.get("limits") or {}).items():
            resources.setdefault("requests", {}).setdefault(name, limit)
        container.setdefault("imagePullPolicy", "IfNotPresent")
        for port in container.get("ports") or []:
            port.setdefault("protocol", "TCP")


def _fill_job(job: Object) -> None:
    spec = job["spec"]
    per_index = spec.get("backoffLimitPerIndex") is not None
    policy = spec.get("podFailurePolicy")
    for field, value in {
        "parallelism": 1,
        "completions": 1 if spec.get("parallelism") in (None, 1) else None,
        "backoffLimit": _INT32 if per_index else 6,
        "completionMode": "NonIndexed",
        "suspend": False,
        "podReplacementPolicy": "Failed" if policy else "TerminatingOrFailed",
    }.items():
        if spec.get(field) is None and value is not None:
            spec[field] = value
    for rule in (policy or {}).get("rules", []):
        for pattern in rule.get("onPodConditions") or []:
            pattern.setdefault("status", "True")
    _fill_pod(spec["template"])
    job["status"] = {}


def _path(parts: Sequence[Any]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.lstrip(".")
