"""Patches as the API server applies them: merge, and strategic merge."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

# The lists that a strategic merge merges, and the field by which it knows their items.
_KEYS = {
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "ports": ("containerPort", "port"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_SETS = {"finalizers"}


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def merged_strategically(target: Any, patch: Any, field: str = "") -> Any:
    """A merge that knows items of some lists by name."""
    if isinstance(patch, Mapping):
        if patch.get("$patch") == "replace":
            return {key: value for key, value in patch.items() if key != "$patch"}
        result = dict(target) if isinstance(target, Mapping) else {}
        for key, value in patch.items():
            if key.startswith(("$setElementOrder/", "$retainKeys")):
                continue
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged_strategically(result.get(key), value, key)
        return result
    if isinstance(patch, list) and isinstance(target, list):
        if field in _SETS:
            return [*target, *(item for item in patch if item not in target)]
        if field in _KEYS and all(isinstance(item, Mapping) for item in patch):
            return _merged_lists(target, patch, _KEYS[field])
    return copy.deepcopy(patch)


def _merged_lists(target: list[Any], patch: Sequence[Any], keys: Sequence[str]) -> list[Any]:
    result = list(target)
    for item in patch:
        key = next((key for key in keys if key in item), None)
        if key is None:
            result.append(item)
            continue
        same = [index for index, old in enumerate(result) if old.get(key) == item[key]]
        if item.get("$patch") == "delete":
            result = [old for old in result if old.get(key) != item[key]]
        elif same:
            result[same[0]] = merged_strategically(result[same[0]], item)
        else:
            result.append(copy.deepcopy(item))
    return result
