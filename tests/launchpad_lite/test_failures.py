"""What failures of nodes tell, and which of them are only consequences of others."""

import pickle
from typing import Any

import pytest

import courier
import launchpad_lite as lp


def test_errors_pickle() -> None:
    first = lp.NodeFailure("a[0]", "host", "broke")
    failed = lp.NodeFailedError(first, [lp.NodeFailure("b[0]", "host", "too")], "/logs")
    twin = pickle.loads(pickle.dumps(failed))
    assert (str(twin), twin.failure) == (str(failed), first)
    assert twin.consequences == failed.consequences
    refused = lp.ProgramError("p", ["one", "two"])
    again = pickle.loads(pickle.dumps(refused))
    assert (str(again), again.mistakes) == (str(refused), ("one", "two"))


def test_the_loss_of_a_host_is_told_once_however_many_nodes_were_on_it() -> None:
    gone = "the host far is gone"
    nodes = [f"actor[{index}]" for index in range(20)]
    failures = [lp.NodeFailure(node, "far", gone, host_lost=True) for node in nodes]
    text = str(lp.NodeFailedError(failures[0], failures[1:]))
    assert text.startswith(f"20 nodes on far failed: {gone}\n")
    assert text.count(gone) == 1
    assert all(node in text for node in nodes)
    learner = lp.NodeFailure("learner[0]", "near", "broke")
    followed = str(lp.NodeFailedError(learner, failures)).partition("What followed:")[2]
    assert followed == f"\n  actor[0], actor[1], actor[2] and 17 more on far failed: {gone}"


def test_a_node_that_is_lost_with_its_last_restart_shows_its_history() -> None:
    before = lp.Restart("a", 1, 0.0, 0.0, lp.NodeFailure("a", "far", "a broke"))
    lost = lp.NodeFailure("a", "far", "the host is gone", host_lost=True, restarts=(before,))
    text = str(lp.NodeFailedError(lost, [lp.NodeFailure("b", "far", lost.summary, host_lost=True)]))
    assert "a: Its restart policy allows no more than 1" in text
    assert "a broke" in text


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (courier.ServerLostError("gone"), True),
        (courier.ServerUnreachableError("gone"), True),
        (courier.CallCancelledError("closed"), True),
        (courier.CallTimeoutError("slow"), False),
        (ValueError("mine"), False),
    ],
)
def test_errors_of_calls_to_lost_nodes_are_consequences(error: Any, is_consequence: bool) -> None:
    report = courier.ExceptionReport.of(error)
    assert lp.NodeFailure.of_exception("a", "host", report).is_consequence is is_consequence
