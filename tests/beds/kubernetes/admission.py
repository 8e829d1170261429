"""What the API server refuses, and the defaults it fills in: what our launcher could get wrong.

Structure comes from the published schemas of the newest release that kubernetes-validate knows; of
what schemas cannot say, only the rules that objects of a launcher meet are here.
"""

import base64
import binascii
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.beds.kubernetes.store import RESOURCES, ApiError, Object

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
_QUANTITY = re.compile(r"([+-]?[0-9.]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
_SUFFIXES = {
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
    "n": Decimal(10) ** -9,
    "u": Decimal(10) ** -6,
    "m": Decimal(10) ** -3,
}
_MAX_SECRET = 1 << 20
_MAX_ANNOTATIONS = 256 << 10
_MAX_STORED = 3 << 19
_INT32 = 2**31 - 1

Causes = Iterator[tuple[str, str]]


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
        if mistake.validator == "required":
            _refuse(resource, item, [(path, f"Required value: {mistake.message}")])
        verb = "unknown field" if mistake.validator == "additionalProperties" else "wrong type"
        raise ApiError(
            400,
            "BadRequest",
            f'{known.kind} in version "{known.version}" cannot be handled as a {known.kind}: '
            f'strict decoding error: {verb} "{path}": {mistake.message[:300]}',
        )


def check(resource: str, item: Mapping[str, Any]) -> None:
    """Raises ApiError with all semantic mistakes of an object."""
    causes = [*_check_metadata(resource, item["metadata"])]
    if not causes:
        causes = [*_CHECKS[resource](item)] if resource in _CHECKS else []
    if causes:
        _refuse(resource, item, causes)
    if len(json.dumps(item)) > _MAX_STORED:
        raise ApiError(500, "InternalError", "etcdserver: request is too large")


def check_update(resource: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises ApiError for changes of what does not change."""
    causes = [
        (f"metadata.{field}", "Invalid value: field is immutable")
        for field in ("name", "namespace", "uid")
        if old["metadata"].get(field) != new["metadata"].get(field)
    ]
    fixed: Sequence[str] = ()
    if resource == "jobs":
        fixed = ("completions", "selector", "completionMode", "podFailurePolicy")
        fixed += ("backoffLimitPerIndex", "podReplacementPolicy", "manualSelector")
        if not old["spec"].get("suspend"):
            fixed += ("template",)
        elif _frozen_template(old) != _frozen_template(new):
            causes.append(("spec.template", "Invalid value: field is immutable"))
    elif resource == "pods" and old["spec"] != new["spec"]:
        causes.append(
            (
                "spec",
                "Forbidden: pod updates may not change fields other than `spec.containers[*].image`",
            )
        )
    elif resource == "services" and old["spec"].get("clusterIP") != new["spec"].get("clusterIP"):
        causes.append(("spec.clusterIP", "Invalid value: may not change once set"))
    elif resource in ("secrets", "configmaps") and old.get("immutable"):
        if old.get("data") != new.get("data"):
            causes.append(("data", "Forbidden: field is immutable when `immutable` is set"))
    causes += [
        (f"spec.{field}", "Invalid value: field is immutable")
        for field in fixed
        if old["spec"].get(field) != new["spec"].get(field)
    ]
    if causes:
        _refuse(resource, new, causes)


def _frozen_template(job: Mapping[str, Any]) -> Any:
    """Of a suspended job, where it runs may still change."""
    spec = job["spec"]["template"]["spec"]
    free = ("nodeSelector", "tolerations", "affinity", "schedulingGates")
    return {key: value for key, value in spec.items() if key not in free}


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
        for key, text in (item.pop("stringData", None) or {}).items():
            item.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
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


def _refuse(resource: str, item: Mapping[str, Any], causes: Sequence[tuple[str, str]]) -> None:
    known = RESOURCES[resource]
    name = item["metadata"].get("name", "")
    texts = [f"{field}: {text}" for field, text in causes]
    message = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    kind = f"{known.kind}.{known.group}" if known.group else known.kind
    raise ApiError(
        422,
        "Invalid",
        f'{kind} "{name}" is invalid: {message}',
        {
            "name": name,
            "group": known.group,
            "kind": known.kind,
            "causes": [
                {
                    "reason": "FieldValue" + "".join(text.split(":")[0].title().split()),
                    "message": text,
                    "field": field,
                }
                for field, text in causes
            ],
        },
    )


def _check_metadata(resource: str, metadata: Mapping[str, Any]) -> Causes:
    name = metadata.get("name") or metadata.get("generateName", "").rstrip("-.")
    if not name:
        yield "metadata.name", "Required value: name or generateName is required"
    elif resource == "services":
        if not (_LABEL_1035.fullmatch(name) and len(name) <= 63):
            yield (
                "metadata.name",
                f"Invalid value: \"{name}\": a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and have at most 63 characters",
            )
    elif not (_SUBDOMAIN.fullmatch(name) and len(name) <= 253):
        yield (
            "metadata.name",
            f"Invalid value: \"{name}\": a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character",
        )
    yield from _check_labels("metadata.labels", metadata.get("labels"))
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        if not _QUALIFIED.fullmatch(key):
            yield (
                "metadata.annotations",
                f'Invalid value: "{key}": name part must consist of alphanumeric characters',
            )
    if sum(len(key) + len(value.encode()) for key, value in annotations.items()) > _MAX_ANNOTATIONS:
        yield "metadata.annotations", f"Too long: may not be more than {_MAX_ANNOTATIONS} bytes"
    for index, owner in enumerate(metadata.get("ownerReferences") or []):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                yield f"metadata.ownerReferences[{index}].{field}", "Required value"


def _check_labels(path: str, labels: Mapping[str, str] | None) -> Causes:
    for key, value in (labels or {}).items():
        if not _QUALIFIED.fullmatch(key):
            yield (
                path,
                f"Invalid value: \"{key}\": name part must consist of alphanumeric characters, '-', '_' or '.'",
            )
        if not _VALUE.fullmatch(value):
            yield (
                path,
                f"Invalid value: \"{value}\": a valid label must be an empty string or consist of at most 63 alphanumeric characters, '-', '_' or '.'",
            )


def _check_job(job: Mapping[str, Any]) -> Causes:
    spec = job["spec"]
    name = job["metadata"].get("name", "")
    indexed = spec.get("completionMode") == "Indexed"
    if spec.get("completionMode") not in ("Indexed", "NonIndexed"):
        yield "spec.completionMode", f'Unsupported value: "{spec.get("completionMode")}"'
    if indexed:
        if spec.get("completions") is None:
            yield "spec.completions", "Required value: when completion mode is Indexed"
        else:
            host = f"{name}-{max(spec['completions'] - 1, 0)}"
            if not (_LABEL.fullmatch(host) and len(host) <= 63):
                yield (
                    "metadata.name",
                    f'Invalid value: "{host}": will not able to create pod with invalid DNS label',
                )
    for field in ("parallelism", "completions", "backoffLimit", "backoffLimitPerIndex"):
        if (spec.get(field) or 0) < 0:
            yield (
                f"spec.{field}",
                f"Invalid value: {spec[field]}: must be greater than or equal to 0",
            )
    for field in ("ttlSecondsAfterFinished", "activeDeadlineSeconds"):
        if (spec.get(field) or 0) < 0:
            yield (
                f"spec.{field}",
                f"Invalid value: {spec[field]}: must be greater than or equal to 0",
            )
    if spec.get("backoffLimitPerIndex") is not None and not indexed:
        yield "spec.backoffLimitPerIndex", "Invalid value: requires indexed completion mode"
    if spec.get("maxFailedIndexes") is not None and spec.get("backoffLimitPerIndex") is None:
        yield "spec.backoffLimitPerIndex", "Required value: when maxFailedIndexes is specified"
    if spec.get("podReplacementPolicy") not in ("Failed", "TerminatingOrFailed"):
        yield (
            "spec.podReplacementPolicy",
            f'Unsupported value: "{spec.get("podReplacementPolicy")}"',
        )
    template = spec["template"]
    restart = template["spec"].get("restartPolicy")
    if restart not in ("Never", "OnFailure"):
        yield (
            "spec.template.spec.restartPolicy",
            f'Unsupported value: "{restart}": supported values: "OnFailure", "Never"',
        )
    if policy := spec.get("podFailurePolicy"):
        if restart != "Never":
            yield (
                "spec.template.spec.restartPolicy",
                f'Invalid value: "{restart}": only "Never" is supported when podFailurePolicy is specified',
            )
        if spec["podReplacementPolicy"] != "Failed":
            yield (
                "spec.podReplacementPolicy",
                'Unsupported value: supported values: "Failed" with podFailurePolicy',
            )
        names = {one["name"] for one in _containers(template["spec"])}
        for index, rule in enumerate(policy.get("rules") or []):
            yield from _check_rule(f"spec.podFailurePolicy.rules[{index}]", rule, spec, names)
    yield from _check_labels(
        "spec.template.metadata.labels", (template.get("metadata") or {}).get("labels")
    )
    yield from _check_pod_spec("spec.template.spec", template["spec"])


def _check_rule(
    path: str, rule: Mapping[str, Any], spec: Mapping[str, Any], names: set[str]
) -> Causes:
    if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
        yield f"{path}.action", f'Unsupported value: "{rule["action"]}"'
    if rule["action"] == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
        yield (
            f"{path}.action",
            'Invalid value: "FailIndex": requires the backoffLimitPerIndex to be set',
        )
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
    if bool(codes) == bool(conditions):
        yield path, "Invalid value: specifying one of OnExitCodes and OnPodConditions is required"
    if codes:
        values = codes["values"]
        if codes.get("containerName") and codes["containerName"] not in names:
            yield (
                f"{path}.onExitCodes.containerName",
                f'Invalid value: "{codes["containerName"]}": must be one of the container or initContainer names',
            )
        if codes["operator"] not in ("In", "NotIn"):
            yield f"{path}.onExitCodes.operator", f'Unsupported value: "{codes["operator"]}"'
        if codes["operator"] == "In" and 0 in values:
            yield (
                f"{path}.onExitCodes.values",
                "Invalid value: 0: must not be 0 for the In operator",
            )
        if values != sorted(set(values)) or not 1 <= len(values) <= 255:
            yield (
                f"{path}.onExitCodes.values",
                "Invalid value: must be ordered and without duplicates",
            )
    for index, pattern in enumerate(conditions or []):
        if pattern.get("status") not in ("True", "False", "Unknown"):
            yield (
                f"{path}.onPodConditions[{index}].status",
                f'Unsupported value: "{pattern.get("status")}"',
            )


def _containers(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(spec.get("initContainers") or []), *spec["containers"]]


def _check_pod_spec(path: str, spec: Mapping[str, Any]) -> Causes:
    if spec.get("restartPolicy", "Always") not in ("Always", "OnFailure", "Never"):
        yield f"{path}.restartPolicy", f'Unsupported value: "{spec["restartPolicy"]}"'
    for field in ("hostname", "subdomain"):
        value = spec.get(field)
        if value and not (_LABEL.fullmatch(value) and len(value) <= 63):
            yield (
                f"{path}.{field}",
                f'Invalid value: "{value}": a lowercase RFC 1123 label is required',
            )
    if (spec.get("terminationGracePeriodSeconds") or 0) < 0:
        yield (
            f"{path}.terminationGracePeriodSeconds",
            "Invalid value: must be greater than or equal to 0",
        )
    yield from _check_labels(f"{path}.nodeSelector", spec.get("nodeSelector"))
    for index, one in enumerate(spec.get("tolerations") or []):
        if one.get("operator", "Equal") == "Exists" and one.get("value"):
            yield (
                f"{path}.tolerations[{index}].operator",
                "Invalid value: value must be empty when `operator` is 'Exists'",
            )
        if one.get("effect") not in (None, "", "NoSchedule", "PreferNoSchedule", "NoExecute"):
            yield f"{path}.tolerations[{index}].effect", f'Unsupported value: "{one["effect"]}"'
    volumes: set[str] = set()
    for index, volume in enumerate(spec.get("volumes") or []):
        place = f"{path}.volumes[{index}]"
        name = volume["name"]
        if not (_LABEL.fullmatch(name) and len(name) <= 63):
            yield (
                f"{place}.name",
                f'Invalid value: "{name}": a lowercase RFC 1123 label is required',
            )
        if name in volumes:
            yield f"{place}.name", f'Duplicate value: "{name}"'
        volumes.add(name)
        sources = [key for key in volume if key != "name"]
        if len(sources) != 1:
            yield place, f"Forbidden: exactly one volume type is needed, not {sources}"
        for source in sources:
            mode = (volume[source] or {}).get("defaultMode")
            if mode is not None and not 0 <= mode <= 0o777:
                yield (
                    f"{place}.{source}.defaultMode",
                    f"Invalid value: {mode}: must be a number between 0 and 0777 (octal)",
                )
    names: set[str] = set()
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or []):
            place = f"{path}.{kind}[{index}]"
            if container["name"] in names:
                yield f"{place}.name", f'Duplicate value: "{container["name"]}"'
            names.add(container["name"])
            yield from _check_container(place, container, volumes)
    if not spec["containers"]:
        yield f"{path}.containers", "Required value"


def _check_container(path: str, container: Mapping[str, Any], volumes: set[str]) -> Causes:
    name = container["name"]
    if not (_LABEL.fullmatch(name) and len(name) <= 63):
        yield f"{path}.name", f'Invalid value: "{name}": a lowercase RFC 1123 label is required'
    if not container.get("image"):
        yield f"{path}.image", "Required value"
    elif container["image"] != container["image"].strip():
        yield f"{path}.image", "Invalid value: must not have leading or trailing whitespace"
    if container.get("imagePullPolicy", "Always") not in ("Always", "IfNotPresent", "Never"):
        yield f"{path}.imagePullPolicy", f'Unsupported value: "{container["imagePullPolicy"]}"'
    places: set[str] = set()
    for index, mount in enumerate(container.get("volumeMounts") or []):
        place = f"{path}.volumeMounts[{index}]"
        if mount["name"] not in volumes:
            yield f"{place}.name", f'Not found: "{mount["name"]}"'
        if mount["mountPath"] in places:
            yield f"{place}.mountPath", f'Invalid value: "{mount["mountPath"]}": must be unique'
        if ":" in mount["mountPath"]:
            yield f"{place}.mountPath", "Invalid value: must not contain ':'"
        places.add(mount["mountPath"])
    for index, one in enumerate(container.get("env") or []):
        if not one["name"] or "=" in one["name"]:
            yield f"{path}.env[{index}].name", f'Invalid value: "{one["name"]}"'
        if one.get("value") and one.get("valueFrom"):
            yield (
                f"{path}.env[{index}].valueFrom",
                "Invalid value: may not be specified when `value` is not empty",
            )
    ports: set[str] = set()
    for index, port in enumerate(container.get("ports") or []):
        place = f"{path}.ports[{index}]"
        if not 1 <= port["containerPort"] <= 65535:
            yield f"{place}.containerPort", "Invalid value: must be between 1 and 65535, inclusive"
        label = port.get("name")
        if label and not _PORT_NAME.fullmatch(label):
            yield (
                f"{place}.name",
                f"Invalid value: \"{label}\": must be at most 15 lower case alphanumeric characters or '-', with a letter",
            )
        if label in ports:
            yield f"{place}.name", f'Duplicate value: "{label}"'
        if label:
            ports.add(label)
    yield from _check_resources(f"{path}.resources", container.get("resources") or {})


def _check_resources(path: str, resources: Mapping[str, Any]) -> Causes:
    amounts: dict[str, dict[str, Decimal]] = {"limits": {}, "requests": {}}
    for kind, found in amounts.items():
        for name, text in (resources.get(kind) or {}).items():
            try:
                amount = quantity(text)
            except (ValueError, ArithmeticError):
                yield (
                    f"{path}.{kind}.{name}",
                    f'Invalid value: "{text}": quantities must match the regular expression',
                )
                continue
            found[name] = amount
            if amount < 0:
                yield f"{path}.{kind}.{name}", "Invalid value: must be greater than or equal to 0"
            if "/" in name and amount != int(amount):
                yield f"{path}.{kind}.{name}", "Invalid value: must be an integer"
            if (
                "/" not in name
                and name not in ("cpu", "memory", "ephemeral-storage")
                and not name.startswith("hugepages-")
            ):
                yield (
                    f"{path}.{kind}.{name}",
                    f'Invalid value: "{name}": must be a standard resource type or fully qualified',
                )
    for name, amount in amounts["requests"].items():
        limit = amounts["limits"].get(name)
        if limit is not None and amount > limit:
            yield (
                f"{path}.requests",
                f"Invalid value: must be less than or equal to {name} limit of {limit}",
            )
        if "/" in name and limit != amount:
            yield (
                f"{path}.limits",
                f"Required value: limit must be set and equal for non overcommitable resource {name}",
            )


def _check_service(service: Mapping[str, Any]) -> Causes:
    spec = service["spec"]
    ports = spec.get("ports") or []
    if not ports and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
        yield "spec.ports", "Required value"
    names: set[str] = set()
    for index, port in enumerate(ports):
        name = port.get("name") or ""
        if not name and len(ports) > 1:
            yield f"spec.ports[{index}].name", "Required value"
        if name and not (_LABEL.fullmatch(name) and len(name) <= 63):
            yield (
                f"spec.ports[{index}].name",
                f'Invalid value: "{name}": a lowercase RFC 1123 label is required',
            )
        if name in names and name:
            yield f"spec.ports[{index}].name", f'Duplicate value: "{name}"'
        names.add(name)
        if not 1 <= port["port"] <= 65535:
            yield (
                f"spec.ports[{index}].port",
                "Invalid value: must be between 1 and 65535, inclusive",
            )
    yield from _check_labels("spec.selector", spec.get("selector"))


def _check_data(item: Mapping[str, Any]) -> Causes:
    size = 0
    for key, text in (item.get("data") or {}).items():
        if not _KEY.fullmatch(key) or key in (".", ".."):
            yield (
                f"data[{key}]",
                f"Invalid value: \"{key}\": a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
            )
        if item["kind"] == "Secret":
            try:
                size += len(base64.b64decode(text, validate=True))
            except binascii.Error:
                yield f"data[{key}]", "Invalid value: illegal base64 data"
        else:
            size += len(text.encode())
    if size > _MAX_SECRET:
        yield "data", f"Too long: may not be more than {_MAX_SECRET} bytes"


def _check_jobset(jobset: Mapping[str, Any]) -> Causes:
    spec = jobset["spec"]
    unknown = {*spec} - {
        "replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy",
        "suspend", "coordinator", "managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies",
    }  # fmt: skip
    for field in unknown:
        yield f"spec.{field}", "Invalid value: unknown field"
    names: set[str] = set()
    for index, one in enumerate(spec.get("replicatedJobs") or []):
        path = f"spec.replicatedJobs[{index}]"
        if one["name"] in names:
            yield f"{path}.name", f'Duplicate value: "{one["name"]}"'
        names.add(one["name"])
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                **(one["template"].get("metadata") or {}),
                "name": f"{jobset['metadata'].get('name', '')}-{one['name']}-{one['replicas'] - 1}",
            },
            "spec": one["template"]["spec"],
        }
        try:
            check_structure("jobs", job)
            filled = json.loads(json.dumps(job))
            _fill_job(filled)
            check("jobs", filled)
        except ApiError as error:
            yield f"{path}.template", f"Invalid value: {error}"


def _check_network_policy(policy: Mapping[str, Any]) -> Causes:
    for index, kind in enumerate(policy["spec"].get("policyTypes") or []):
        if kind not in ("Ingress", "Egress"):
            yield f"spec.policyTypes[{index}]", f'Unsupported value: "{kind}"'


def _check_pod(pod: Mapping[str, Any]) -> Causes:
    yield from _check_pod_spec("spec", pod["spec"])


_CHECKS = {
    "configmaps": _check_data,
    "jobs": _check_job,
    "jobsets": _check_jobset,
    "networkpolicies": _check_network_policy,
    "pods": _check_pod,
    "secrets": _check_data,
    "services": _check_service,
}


def _path(parts: Sequence[Any]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.lstrip(".")
