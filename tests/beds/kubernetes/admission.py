"""Objects of another structure, which the API server refuses, and the defaults that it fills in.

Structure comes from the published schemas of the newest release that kubernetes-validate knows. What
schemas cannot say passes here.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.beds.kubernetes.store import RESOURCES, ApiError, Object

_INT32 = 2**31 - 1


def memory_bytes(text: str) -> int:
    """The bytes that a quantity means, as we and tests write it: like 256Mi."""
    powers = {f"{letter}i": power for power, letter in enumerate("KMG", 1)}
    return int(text[:-2]) * 1024 ** powers[text[-2:]]


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
        item["spec"].setdefault("terminationGracePeriodSeconds", 30)
        item["status"] = {"phase": "Pending"}
    elif resource == "jobs":
        _fill_job(item)
    elif resource == "jobsets":
        for one in item["spec"]["replicatedJobs"]:
            one["template"]["spec"].setdefault("completionMode", "Indexed")


def _fill_job(job: Object) -> None:
    spec = job["spec"]
    spec.setdefault("backoffLimit", _INT32)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    job["status"] = {}


def _path(parts: Sequence[Any]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.lstrip(".")
