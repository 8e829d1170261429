"""Mistakes in names, quantities and sizes of a run's objects, told without a cluster. Pure.

All else that an API server may refuse is the server's to say: `admission` asks it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launchers.kubernetes._names import Names

#: The most bytes that an API server takes: of an object, of its annotations, and in a Secret.
_OBJECT_BYTES, _ANNOTATIONS_BYTES, _SECRET_BYTES = 3 << 19, 256 << 10, 1 << 20

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"

#: A pattern, the most characters, and what is said of all else.
_Rule = tuple[str, int, str]

_ENDS = "beginning and ending with a letter or digit"
_DNS_LABEL: _Rule = (_LABEL, 63, f"no DNS label; use a-z, 0-9 and '-', {_ENDS}")
_DNS_NAME: _Rule = (_SUBDOMAIN, 253, f"no DNS name; use a-z, 0-9, '-' and '.', {_ENDS}")
_WORDS = f"use letters, digits, '-', '_' and '.', {_ENDS}"
_KEY: _Rule = (
    rf"({_SUBDOMAIN}/)?{_WORD}",
    317,
    f"no name like 'name' or 'a.domain/name'; {_WORDS}",
)
_VALUE: _Rule = (rf"({_WORD})?", 63, f"no value of a label; {_WORDS}")
_QUANTITY: _Rule = (
    r"\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?",
    253,
    "no quantity; write it like '500m', '2', '512Mi' or '2Gi'",
)

#: Fields that hold one name or quantity. `name` is that of what the field around it holds.
_FIELDS: Mapping[str, _Rule] = {
    "claimName": _DNS_NAME,
    "priorityClassName": _DNS_NAME,
    "runtimeClassName": _DNS_NAME,
    "secretName": _DNS_NAME,
    "serviceAccountName": _DNS_NAME,
    "sizeLimit": _QUANTITY,
}
_NAMED: Mapping[str, _Rule] = {
    "configMap": _DNS_NAME,
    "configMapKeyRef": _DNS_NAME,
    "containers": _DNS_LABEL,
    "imagePullSecrets": _DNS_NAME,
    "initContainers": _DNS_LABEL,
    "secretKeyRef": _DNS_NAME,
    "volumes": _DNS_LABEL,
}
#: Fields that hold names or quantities by names.
_MAPPINGS: Mapping[str, _Rule] = {
    "labels": _VALUE,
    "limits": _QUANTITY,
    "matchLabels": _VALUE,
    "nodeSelector": _VALUE,
    "requests": _QUANTITY,
}
#: Fields that may hold anything by any name.
_FREE = frozenset({"data", "options", "volumeAttributes"})


def mistakes(objects: Sequence[Mapping[str, Any]], names: Names) -> list[str]:
    """Returns which names, quantities and sizes no API server would take, and where."""
    return [
        f"{names.describe(each['kind'], each['metadata']['name'])}: {what}"
        for each in objects
        for what in (*_sizes(each), *_inside(each, "", ""))
    ]


def _sizes(obj: Mapping[str, Any]) -> Iterator[str]:
    if obj["kind"] == "Secret":
        # Base64 makes 4 bytes of 3.
        yield from _too_large("data", _bytes(obj["data"]) * 3 // 4, _SECRET_BYTES)
    else:
        size = len(json.dumps(obj, ensure_ascii=False).encode(errors="surrogatepass"))
        yield from _too_large("the object", size, _OBJECT_BYTES)


def _bytes(texts: Mapping[str, object]) -> int:
    return sum(len(str(each).encode(errors="surrogatepass")) for each in (*texts, *texts.values()))


def _too_large(what: str, size: int, most: int) -> Iterator[str]:
    if size > most:
        yield f"{what}: {size} bytes; an API server takes at most {most}"


def _inside(value: object, path: str, field: str) -> Iterator[str]:
    """Yields the mistakes in a value that stands at `path`, in the field of this name."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            here = f"{path}.{name}".removeprefix(".")
            if name in _MAPPINGS and isinstance(each, Mapping):
                for key, word in each.items():
                    yield from _amiss(key, _KEY, here)
                    yield from _amiss(word, _MAPPINGS[name], f"{here}[{key!r}]")
            elif rule := _NAMED.get(field) if name == "name" else _FIELDS.get(name):
                yield from _amiss(each, rule, here)
            elif name == "annotations" and isinstance(each, Mapping):
                yield from _too_large(here, _bytes(each), _ANNOTATIONS_BYTES)
            elif name not in _FREE:
                yield from _inside(each, here, name)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, each in enumerate(value):
            called = each.get("name", index) if isinstance(each, Mapping) else index
            yield from _inside(each, f"{path}[{called}]", field)


def _amiss(value: object, rule: _Rule, path: str) -> Iterator[str]:
    pattern, longest, complaint = rule
    if not isinstance(value, str | int | float):
        return  # null is absent, and all else is the server's to say
    text = str(value)
    if len(text) > longest:
        yield f"{path}: {text[:60]!r}... has {len(text)} characters; at most {longest} are allowed"
    elif not re.fullmatch(pattern, text):
        yield f"{path}: {value!r} is {complaint}"
