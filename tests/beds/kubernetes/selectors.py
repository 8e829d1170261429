"""Label and field selectors."""

import re
from collections.abc import Callable, Mapping
from typing import Any

Labels = Mapping[str, str]

_SET = re.compile(r"\s*(?P<key>\S+?)\s+(?P<word>in|notin)\s*\((?P<values>[^)]*)\)\s*")
_EQUAL = re.compile(r"\s*(?P<key>[\w./-]+)\s*(?P<word>!=|==?)\s*(?P<values>[\w.-]*)\s*")
_THERE = re.compile(r"\s*(?P<word>!?)\s*(?P<key>[\w./-]+)\s*")


def by_labels(text: str) -> Callable[[Labels], bool]:
    """What `labelSelector=` means.

    Raises:
        ValueError: It is none.
    """
    parts = [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]
    tests = [_requirement(part) for part in parts]
    return lambda labels: all(test(labels) for test in tests)


def _requirement(text: str) -> Callable[[Labels], bool]:
    if found := _SET.fullmatch(text) or _EQUAL.fullmatch(text):
        key, wanted = found["key"], found["word"] not in ("notin", "!=")
        values = {value.strip() for value in found["values"].split(",")}
        return lambda labels: (labels.get(key) in values) is wanted
    if found := _THERE.fullmatch(text):
        key, wanted = found["key"], not found["word"]
        return lambda labels: (key in labels) is wanted
    raise ValueError(f"unable to parse requirement: found {text!r}")


def selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    """What `matchLabels` and `matchExpressions` mean; the empty one selects all."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for one in selector.get("matchExpressions") or []:
        key, values = one["key"], one.get("values") or []
        holds = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[one["operator"]]
        if not holds:
            return False
    return True


def by_fields(text: str) -> Callable[[Mapping[str, Any]], bool]:
    """What `fieldSelector=` means, for any field.

    Raises:
        ValueError: It is none.
    """
    tests: list[tuple[list[str], str, bool]] = []
    for part in filter(None, text.split(",")):
        found = _EQUAL.fullmatch(part)
        if found is None:
            raise ValueError(f"invalid field selector: {part!r}")
        tests.append((found["key"].split("."), found["values"], found["word"] != "!="))

    def field(item: Any, path: list[str]) -> str:
        for part in path:
            item = item.get(part, "") if isinstance(item, Mapping) else ""
        return str(item)

    return lambda item: all((field(item, path) == value) is want for path, value, want in tests)
