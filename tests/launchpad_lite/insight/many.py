"""A program of 1,000 nodes, which a test cannot start."""

from collections.abc import Mapping
from typing import Any

from launchpad_lite.launching import NodeStatus


class Many:
    """Tells of its nodes as an `Inspector` does; some of them tell of their calls."""

    def __init__(self, *, answering: int) -> None:
        self._answering = answering
        self._looks = 0

    def join(self, timeout_s: float) -> bool:
        """It does not end."""
        return False

    def status(self) -> tuple[str, list[NodeStatus]]:
        """Returns other numbers at each look."""
        self._looks += 1
        nodes = [
            NodeStatus(
                *(f"actor[{n}]", "running", f"h{n % 16}", n, {}, 0),
                *((n + self._looks) % 9 / 9, 99.0),
                gpu_memory_mib=None if n else 512.0,
            )
            for n in range(1000)
        ]
        return "many: running", nodes

    def ask(self, question: str, *, timeout_s: float) -> Mapping[str, Any]:
        """Answers for the nodes that do."""
        each = {"errors": 0, "queued": self._looks % 3, "delays": [0, self._looks * 10]}
        served = {"put": {**each, "calls": 10 * self._looks}}
        made = {"actor[0]: put": {"calls": self._looks}}
        answer = {"calls": {"served": served, "made": made}}
        return {f"actor[{n}]": answer for n in range(self._answering)}
