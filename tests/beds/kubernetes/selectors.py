"""Label and field selectors, as our launcher writes them: names and values, all of which must match."""

from collections.abc import Mapping
from typing import Any


def pairs(text: str) -> dict[str, str]:
    """What `labelSelector=` and `fieldSelector=` ask for."""
    return dict(part.split("=", 1) for part in text.split(",") if part)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """What `matchLabels` means; the empty one selects all."""
    return (selector.get("matchLabels") or {}).items() <= labels.items()
