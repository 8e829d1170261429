"""Metadata: labels and annotations, and what selects by them."""

import re
from collections.abc import Sequence

from launchers._kubernetes.checks.places import Place, apply, need
from launchers._kubernetes.checks.values import (
    annotation_key,
    dns_label,
    label_value,
    one_of,
    qualified_name,
)

_ANNOTATIONS_BYTES = 256 << 10


def check_metadata(meta: Place) -> None:
    check_labels(meta["labels"])
    meta["annotations"].keys_obey(annotation_key)
    size = sum(size_of(key) + size_of(each.text) for key, each in meta["annotations"].entries)
    if size > _ANNOTATIONS_BYTES:
        meta["annotations"].wrong(f"{size} bytes in all; at most {_ANNOTATIONS_BYTES} are allowed")
    apply(meta, [("namespace", dns_label), ("finalizers[]", qualified_name)])
    need(meta, [("ownerReferences[]", "apiVersion,kind,name,uid")])
    owners = meta["ownerReferences"].elements
    if sum(owner["controller"].value is True for owner in owners) > 1:
        meta["ownerReferences"].wrong("two have controller: true; at most one may control it")


def size_of(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def check_labels(labels: Place) -> None:
    """Checks labels, or a selector that is only made of some."""
    labels.keys_obey(qualified_name)
    apply(labels, [("*", label_value)])


def check_selector(selector: Place) -> None:
    check_labels(selector["matchLabels"])
    for each in selector["matchExpressions"].elements:
        check_requirement(each, ("In", "NotIn", "Exists", "DoesNotExist"))
        apply(each, [("values[]", label_value)])


def check_requirement(requirement: Place, operators: Sequence[str]) -> None:
    """One expression of a selector: a key, an operator, and values where it takes some."""
    need(requirement, [("", "key,operator")])
    apply(requirement, [("key", qualified_name), ("operator", one_of(*operators))])
    operator, values = requirement["operator"].text, requirement["values"]
    if operator in ("In", "NotIn") and not values.elements:
        values.wrong(f"missing; operator {operator} needs at least one")
    if operator in ("Exists", "DoesNotExist") and values.elements:
        values.wrong(f"operator {operator} takes none; leave them out")
    if operator in ("Gt", "Lt"):
        if len(values.elements) != 1 or not re.fullmatch(r"[+-]?[0-9]+", values.elements[0].text):
            values.wrong(f"operator {operator} takes one whole number, as text")
