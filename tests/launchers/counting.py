"""A node whose state is kept."""

import json
from pathlib import Path


class Counter:
    """Its state is a number."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, by: int = 1) -> int:
        self._value += by
        return self._value

    def save(self, folder: Path) -> None:
        (folder / "value.json").write_text(json.dumps(self._value))

    def restore(self, folder: Path) -> None:
        self._value = json.loads((folder / "value.json").read_text())
