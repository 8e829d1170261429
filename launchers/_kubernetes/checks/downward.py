"""What a pod learns about itself, by variables or by files."""

import re
from collections.abc import Sequence

from launchers._kubernetes.checks.places import Place, need, shown
from launchers._kubernetes.checks.quantities import quantity
from launchers._kubernetes.checks.values import annotation_key, qualified_name

_ALWAYS = ("metadata.name", "metadata.namespace", "metadata.uid")
_ENTRIES = ("metadata.labels['key']", "metadata.annotations['key']")
_IN_FILES = (*_ALWAYS, *_ENTRIES, "metadata.labels", "metadata.annotations")
_IN_VARIABLES = (
    *_ALWAYS,
    *_ENTRIES,
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
)
_ENTRY = r"metadata\.(labels|annotations)\['(.+)'\]"
_RESOURCE = r"(limits|requests)\.(cpu|memory|ephemeral-storage|hugepages-.+)"


def check_variable(source: Place) -> None:
    """Checks where a variable has its value from."""
    _check_source(source, _IN_VARIABLES)


def check_file(item: Place) -> None:
    """Checks where a file in a volume has its content from."""
    _check_source(item, _IN_FILES)
    need(item, [("resourceFieldRef", "containerName,resource")])


def _check_source(source: Place, known: Sequence[str]) -> None:
    path = source["fieldRef"]["fieldPath"]
    if entry := re.fullmatch(_ENTRY, path.text):
        rule = qualified_name if entry[1] == "labels" else annotation_key
        if complaint := rule(entry[2]):
            path.wrong(complaint)
    elif path.text and path.text not in known:
        path.wrong(f"{shown(path.value)} cannot be had here; known are {', '.join(known)}")
    resource = source["resourceFieldRef"]["resource"]
    if resource.text and not re.fullmatch(_RESOURCE, resource.text):
        resource.wrong(f"{shown(resource.value)} is unknown; write it like 'limits.memory'")
    source["resourceFieldRef"]["divisor"].obey(quantity)
