"""What `python -m launchpad_lite.launch status` prints."""

from types import SimpleNamespace
from typing import Any

import pytest

from launchpad_lite._registry import Inspector
from launchpad_lite._run_commands import render_status
from launchpad_lite.launching import NodeStatus


def test_the_status_of_nodes_is_a_table() -> None:
    known = NodeStatus("a[0]", "running", "h1", 4711, {}, 2, 0.51, 100.04)
    unknown = NodeStatus("longer[0]", "starting", "", None, {})
    assert render_status([known, unknown]).splitlines() == [
        "node       state     host  pid   restarts  cores  MiB",
        "a[0]       running   h1    4711  2         0.5    100.0",
        "longer[0]  starting        -     0         -      -",
    ]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("pending", "starting"), "demo: not all nodes have started"),
        (("running", "starting"), "demo: running"),  # one that is restarted
    ],
)
def test_a_program_runs_once_its_nodes_do(states: tuple[str, ...], expected: str) -> None:
    nodes = [NodeStatus(f"a[{index}]", state, "", None, {}) for index, state in enumerate(states)]
    running: Any = SimpleNamespace(
        plan=SimpleNamespace(program="demo"),
        result=None,
        status=lambda: nodes,
        join=lambda _: False,
    )
    assert Inspector(running).status() == (expected, nodes)
