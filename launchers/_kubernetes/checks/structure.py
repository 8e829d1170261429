"""The structure of objects, as the models of the official client have it: fields and their types."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from launchers._kubernetes.checks.places import Place, is_int, is_list, is_map, meant, shown
from launchers._kubernetes.checks.values import INT32_MAX, INT64_MAX

#: The official client has no models of JobSets; the parts that we do not use may be anything.
_JOB_SET = {
    "coordinator": "Dict[str, object]",
    "failurePolicy": "Dict[str, object]",
    "managedBy": "str",
    "network": "Dict[str, object]",
    "replicatedJobs": "List[object]",
    "startupPolicy": "Dict[str, object]",
    "successPolicy": "Dict[str, object]",
    "suspend": "bool",
    "ttlSecondsAfterFinished": "int",
    "volumeClaimPolicies": "List[object]",
}
_REPLICATED_JOB = {
    "dependsOn": "List[object]",
    "groupName": "str",
    "name": "str",
    "replicas": "int",
    "template": "V1JobTemplateSpec",
}
#: Paths of the numbers that have 64 bits; all others have 32.
_LONG = (
    r"((activeDeadline|GracePeriod|toleration|expiration)Seconds|\.(runAsUser|runAsGroup|fsGroup|"
    r"seconds|generation|supplementalGroups\[\d+\]))\Z"
)
#: Paths of the quantities: their model says text, but they may be numbers.
_QUANTITIES = r"\.((limits|requests|overhead|capacity)(\.\w+|\[[^\]]*\])|sizeLimit|divisor)\Z"


def check_structure(root: Place, model: str) -> None:
    """Compares an object, and all that it holds, with a model; without the client, with nothing.

    Args:
        root: The object.
        model: The model's name in the official client.
    """
    if models := _models():
        _check(root, model, models)


def check_structure_of_job_set(root: Place) -> None:
    """As `check_structure`."""
    if models := _models():
        _check(root["metadata"], "V1ObjectMeta", models)
        if root["spec"].given:
            _check_fields(root["spec"], _JOB_SET, models)
        for job in root.select("spec.replicatedJobs[]"):
            _check_fields(job, _REPLICATED_JOB, models)


def _models() -> Any:
    try:
        from kubernetes.client import models
    except ImportError:
        return None
    return models


def _package() -> str:
    """Names the official client that is installed."""
    import kubernetes

    return f"the package kubernetes {kubernetes.__version__}"


def _check(place: Place, expected: str, models: Any) -> None:
    if not place.given:
        return
    # The client spelt them list[X] and dict(str, X) in earlier releases.
    if match := re.fullmatch(r"[Ll]ist\[(.+)\]", expected):
        _check_list(place, match[1], models)
    elif match := re.fullmatch(r"(?:Dict\[str, |dict\(str, )(.+)[\])]", expected):
        _check_map(place, match[1], models)
    elif expected in _PLAIN:
        what, fits = _PLAIN[expected]
        if not fits(place):
            place.wrong(f"expected {what}, got {shown(place.value)}")
    elif model := getattr(models, expected, None):
        _check_model(place, model, models)


def _check_list(place: Place, expected: str, models: Any) -> None:
    if not is_list(place.value):
        place.wrong(f"expected a list, got {shown(place.value)}")
    for each in place.elements:
        if each.given:
            _check(each, expected, models)
        else:
            each.wrong("null in a list; leave it out")


def _check_map(place: Place, expected: str, models: Any) -> None:
    if not is_map(place.value):
        place.wrong(f"expected an object of names and values, got {shown(place.value)}")
    elif strange := [key for key in place.value if not isinstance(key, str)]:
        place.wrong(f"the name {shown(strange[0])} is no text; put it into quotes")
    for _, each in place.entries:
        _check(each, expected, models)


def _check_model(place: Place, model: Any, models: Any) -> None:
    names: Mapping[str, str] = model.attribute_map
    types, required = _fields(model)
    _check_fields(place, types, models, names)
    if is_map(place.value):
        for name in required:
            if not place[name].given:
                place[name].wrong("missing; give it")


@cache
def _fields(model: Any) -> tuple[Mapping[str, str], Sequence[str]]:
    """Types of a model's fields, and which of them are required."""
    names = model.attribute_map
    types = {names[attribute]: kind for attribute, kind in model.openapi_types.items()}
    # Earlier releases do not tell which fields are required.
    fields = getattr(model, "model_fields", {})
    return types, [names[each] for each, field in fields.items() if field.is_required()]


def _check_fields(
    place: Place, types: Mapping[str, str], models: Any, spellings: Mapping[str, str] | None = None
) -> None:
    """Checks the fields of an object.

    Args:
        place: The object.
        types: Types of the fields it may have.
        models: Models of the official client.
        spellings: Names of fields by how Python spells them.
    """
    if not is_map(place.value):
        place.wrong(f"expected an object, got {shown(place.value)}")
        return
    for key in place.value:
        if not isinstance(key, str) or key not in types:
            name = (spellings or {}).get(str(key))
            hint = f"did you mean {name!r}?" if name else meant(str(key), sorted(types))
            if spellings is not None and name is None:
                hint += f" ({_package()} does not know it; a newer one may)"
            place.wrong(f"unknown field {shown(key)}; {hint}")
    for key, each in place.entries:
        if key in types:
            _check(each, types[key], models)


def _is_text(place: Place) -> bool:
    return isinstance(place.value, str)


def _fits_int(place: Place) -> bool:
    highest = INT64_MAX if re.search(_LONG, place.path) else INT32_MAX
    return is_int(place.value) and -highest - 1 <= place.value <= highest


def _is_number(place: Place) -> bool:
    return is_int(place.value) or isinstance(place.value, float)


def _is_text_or_quantity(place: Place) -> bool:
    return _is_text(place) or (_is_number(place) and re.search(_QUANTITIES, place.path) is not None)


def _fits_anything(place: Place) -> bool:
    """Of unspecified type, ports alone concern us: they are numbers or names."""
    is_port = place.path.endswith((".port", ".targetPort"))
    return not is_port or _is_text(place) or _fits_int(place)


_PLAIN: Mapping[str, tuple[str, Callable[[Place], bool]]] = {
    "bool": ("true or false", lambda place: isinstance(place.value, bool)),
    "bytes": ("text in base64", _is_text),
    "datetime": ("a time as text", _is_text),
    "float": ("a number", _is_number),
    "int": ("a whole number", _fits_int),
    "object": ("a number or a name", _fits_anything),
    "str": ("text", _is_text_or_quantity),
}
