"""What `python -m launchpad_lite.launch status` prints."""

from launchpad_lite._command_line import render_status
from launchpad_lite.launching import NodeStatus


def test_the_status_of_nodes_is_a_table() -> None:
    known = NodeStatus("a[0]", "running", "h1", 4711, {}, 2, 0.51, 100.04)
    unknown = NodeStatus("longer[0]", "starting", "", None, {})
    assert render_status([known, unknown]).splitlines() == [
        "node       state     host  pid   restarts  cores  MiB",
        "a[0]       running   h1    4711  2         0.5    100.0",
        "longer[0]  starting        -     0         -      -",
    ]
