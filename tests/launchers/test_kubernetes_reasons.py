"""What people are told of pods that wait, fail or are taken away: from objects as servers have them."""

from typing import Any

import pytest

from launchers.kubernetes._reasons import (
    explained,
    failure_of,
    has_ended,
    is_over,
    is_running,
    loss_of,
    remaining,
    supervisor_end,
    told,
    wait_of,
    wait_of_job,
)
from launchers.kubernetes._sight import Sight
from launchpad_lite.launching import NodeFailure, Outcome, ProgramResult
from launchpad_lite.life.result import Restart
from tests.launchers.kubernetes_seen import (
    NAMES,
    QUEUED,
    RUN,
    UNSCHEDULABLE,
    condition,
    disrupted,
    ended,
    event,
    job,
    pod,
    ready,
    running,
    terminated,
    waiting,
)

FIRST, EARLIER, LATER = (f"2026-01-01T00:00:{s}Z" for s in ("00", "10", "20"))
NO_ROOM = event("p", "FailedScheduling", "2 Insufficient cpu.")
CREATING = waiting("ContainerCreating")
PLACED = pod(state=CREATING, conditions=(condition("PodScheduled", "True", ""),))
EVICTED = disrupted("TerminationByKubelet", phase="Failed", reason="Evicted", message="low")
DRAINED = disrupted("EvictionByEvictionAPI", "evicting", phase="Running", deleted=True)
SHUT_DOWN = pod(phase="Failed", reason="Terminated", message="imminent shutdown.")
AWAY = event("p", "NodeNotReady", "Node is not ready")
BEGAN_ANEW = "was lost, as when its machine or the runtime there restarts"
LOST = "is on the machine machine-1, which is lost: NodeNotReady: Node is not ready"
MOUNT = event("p", "FailedMount", "no claim")


@pytest.mark.parametrize(
    ("one", "events", "expected"),
    [
        (pod(), [], None),
        (pod(conditions=(UNSCHEDULABLE,)), [], "Unschedulable: 2 Insufficient gpu."),
        (pod(state=CREATING), [], None),
        (pod(state=CREATING), [MOUNT], "FailedMount: no claim"),
        (pod(), [NO_ROOM], "FailedScheduling: 2 Insufficient cpu."),
        (PLACED, [NO_ROOM], None),
        (PLACED, [MOUNT, NO_ROOM], "FailedMount: no claim"),
        (pod(state=waiting("ErrImagePull", "not\n found")), [MOUNT], "ErrImagePull: not found"),
        (running(), [MOUNT], None),
        (pod(phase="Failed", conditions=(UNSCHEDULABLE,)), [], None),
        ({"kind": "Pod", "metadata": {"name": "p", "uid": "1"}}, [], None),
    ],
)
def test_what_a_pod_waits_for(one: Any, events: Any, expected: str | None) -> None:
    assert wait_of(one, events) == expected


QUOTA = event(f"{RUN}-actor", "FailedCreate", 'pods "x" is forbidden: exceeded quota')
OTHER_QUOTA = event(f"{RUN}-actor", "FailedCreate", 'pods "y" is forbidden: exceeded quota')
#: Not with the name of a pod that was not made: each attempt has another one.
TOO_MANY = f'FailedCreate: pods "{RUN}-actor-*" is forbidden: exceeded quota'


@pytest.mark.parametrize(
    ("one", "events", "expected"),
    [
        (job(), [], None),
        (job(active=1), [QUOTA], TOO_MANY),
        (job(active=1), [QUOTA, OTHER_QUOTA], TOO_MANY),
        (job(active=2), [QUOTA], None),
        (job(active=1), [event("j", "BackoffLimitExceeded", "x")], None),
        (job(spec={"suspend": True}), [], "its admission"),
        (QUEUED, [], "its turn in the queue 'team'"),
    ],
)
def test_why_a_job_makes_no_pods(one: Any, events: Any, expected: str | None) -> None:
    assert wait_of_job(one, events) == expected


@pytest.mark.parametrize(
    ("one", "events", "expected"),
    [
        (running(), [], None),
        (ended(137, "OOMKilled"), [], "was killed: out of memory (limit 64Mi)"),
        (ended(137, "OOMKilled", memory=None), [], "was killed: out of memory (it had no limit)"),
        (EVICTED, [], "was evicted by its machine: low"),
        (DRAINED, [], "was evicted, as by a drain of its machine: evicting"),
        (disrupted("PreemptionByScheduler"), [], "was preempted by one of higher priority"),
        (disrupted("Novelty", "x"), [], "was ended (Novelty): x"),
        (SHUT_DOWN, [], "was ended (Terminated): imminent shutdown."),
        (running(), [AWAY], LOST),
        (ended(137), [AWAY], "was killed by SIGKILL"),
        (ready("True", LATER), [{**AWAY, "lastTimestamp": EARLIER}], None),
        (ready("True", EARLIER), [{**AWAY, "lastTimestamp": LATER}], LOST),
        (ended(3), [], "ended with exit code 3"),
        (ended(139), [], "was ended by signal 11"),
        (ended(255, "Unknown"), [], BEGAN_ANEW),
        (ended(137, "ContainerStatusUnknown", "not found"), [], f"{BEGAN_ANEW}: not found"),
        (ended(192), [], "was ended by signal 64"),
        (ended(255), [], "ended with exit code 255"),
        (ended(128, "StartError", "no python3"), [], "could not be started: no python3"),
        (pod(phase="Succeeded", state=terminated(0, "Completed")), [], None),
        (ended(1), [], None),
        (ended(75), [], None),
        (running(deleted=True), [], "was deleted"),
    ],
)
def test_what_became_of_a_pod(one: Any, events: Any, expected: str | None) -> None:
    assert loss_of(one, events) == expected


FAILED = condition("Failed", "True", "BackoffLimitExceeded", "Job has reached its limit")


TOO_LONG = condition("Failed", "True", "DeadlineExceeded", "too long")


def supervisor(*, phase: str = "Failed", **fields: Any) -> dict[str, Any]:
    return pod(RUN, container="supervisor", phase=phase, **fields)


@pytest.mark.parametrize(
    ("one", "owner", "expected"),
    [
        (None, None, "its supervisor never began: the run was deleted"),
        (None, job(RUN, TOO_LONG), "its supervisor never began: DeadlineExceeded: too long"),
        (None, job(RUN, FAILED, failed=1), "its supervisor's pod is gone; it left no result"),
        (
            supervisor(state=terminated(137, "OOMKilled")),
            job(RUN, FAILED),
            f"its supervisor's pod {RUN}-abcde was killed: out of memory (limit 64Mi); it left no result",
        ),
        (
            supervisor(state=terminated(1)),
            job(RUN),
            f"its supervisor's pod {RUN}-abcde ended with exit code 1; it left no result",
        ),
        (
            supervisor(phase="Running", deleted=True),
            None,
            f"its supervisor's pod {RUN}-abcde was deleted; the run was deleted",
        ),
    ],
)
def test_why_a_supervisor_left_no_word(one: Any, owner: Any, expected: str) -> None:
    assert supervisor_end(one, owner, []) == expected


def test_lines_name_some_nodes_and_count_the_others() -> None:
    many = [f"actor[{i}]" for i in range(50)]
    assert told({"X: y": ["learner[0]"], "Z": many}, {}) == [
        "learner[0] waits: X: y",
        "actor[0], actor[1], actor[2], actor[3] and 46 more wait: Z",
    ]


def test_what_remains_says_on_which_machine() -> None:
    secret = {"kind": "Secret", "metadata": {"name": "x"}}
    assert remaining([pod(), secret]) == f"Pod {RUN}-actor-0-abcde on machine-1, Secret x"


def test_when_jobs_and_pods_are_over() -> None:
    assert is_over(job(RUN, FAILED))
    assert is_over(job(RUN, condition("Complete", "True", "")))
    assert not is_over(job(RUN, condition("Suspended", "True", "")))
    assert has_ended(pod(phase="Failed"))
    assert has_ended(pod(phase="Running", state=terminated(0)))
    assert not has_ended(running())
    assert is_running(running())
    assert not is_running(pod())


# What was seen


def sight() -> Sight:
    nodes = [("actor", 0), ("actor", 1), ("learner", 0)]
    return Sight(NAMES, nodes, movable=["actor[0]", "actor[1]"])


def test_waits_are_told_by_node() -> None:
    seen = sight()
    seen.take_in("ADDED", pod(f"{RUN}-actor-0", conditions=(UNSCHEDULABLE,)))
    seen.take_in("ADDED", pod(f"{RUN}-learner-0", conditions=(UNSCHEDULABLE,)))
    seen.take_in("ADDED", supervisor(phase="Pending", state=waiting("ErrImagePull", "no")))
    assert seen.waits() == {
        "Unschedulable: 2 Insufficient gpu.": ["actor[0]", "learner[0]"],
        "ErrImagePull: no": ["supervisor"],
    }
    begun = running(f"{RUN}-actor-0")
    seen.take_in("MODIFIED", begun)
    assert seen.missing() == ["actor[1]", "learner[0]"]
    assert [*seen.waits().values()] == [["learner[0]"], ["supervisor"]]
    seen.take_in("DELETED", begun)
    assert seen.missing() == ["actor[0]", "actor[1]", "learner[0]"]


def test_a_quota_is_told_of_the_nodes_that_have_no_pod() -> None:
    seen = sight()
    seen.take_in("ADDED", job(active=1))
    seen.take_in("ADDED", running(f"{RUN}-actor-0"))
    seen.take_in("ADDED", QUOTA)
    assert list(seen.waits().values()) == [["actor[1]"]]
    seen.take_in("MODIFIED", job(active=2))
    assert seen.waits() == {}


def test_a_pod_that_ended_is_told_until_another_runs() -> None:
    seen = sight()
    seen.take_in("ADDED", ended(137, "OOMKilled"))
    assert seen.waits() == {
        "another pod; the last one was killed: out of memory (limit 64Mi)": ["actor[0]"]
    }
    seen.take_in("ADDED", running(uid="2"))
    assert seen.waits() == {}


def test_a_pod_is_waited_for_only_where_one_comes() -> None:
    seen = sight()
    seen.take_in("ADDED", ended(137, "OOMKilled", host=f"{RUN}-learner-0"))
    assert seen.waits() == {}
    assert seen.troubles() == {
        f"its pod {RUN}-learner-0 was killed: out of memory (limit 64Mi)": ["learner[0]"]
    }


def test_a_pod_whose_machine_is_away_is_no_lost_one_before_it_has_ended() -> None:
    seen = sight()
    given_up = condition("DisruptionTarget", "True", "DeletionByTaintManager")
    away = condition("Ready", "False", "")
    seen.take_in("ADDED", running())
    seen.take_in("ADDED", running(RUN, container="supervisor"))
    for name in (f"{RUN}-actor-0-abcde", f"{RUN}-abcde"):
        seen.take_in("ADDED", event(name, "NodeNotReady", "Node is not ready"))
    known = {"the cluster gets no signal from the machine machine-1": ["actor[0]", "supervisor"]}
    assert seen.troubles() == known
    seen.take_in("MODIFIED", running(conditions=(away, given_up), deleted=True))
    assert seen.waits() == {}
    assert seen.troubles() == known
    seen.take_in("DELETED", running(conditions=(away, given_up), deleted=True))
    assert [*seen.waits().values()] == [["actor[0]"]]
    assert "supervisor" in next(iter(seen.troubles().values()))


def test_pods_that_nobody_replaces_are_known() -> None:
    seen = sight()
    failed = pod(f"{RUN}-actor-1", phase="Failed", state=terminated(1))
    seen.take_in("ADDED", failed)
    seen.take_in("ADDED", job(failed=1))
    assert seen.failed() == {}
    seen.take_in("MODIFIED", job(failed=1, failedIndexes="1,3-5"))
    assert seen.failed() == {"actor[1]": failed}
    assert failure_of(failed, []) == "ended with exit code 1"


def test_events_of_others_are_no_matter() -> None:
    seen = sight()
    seen.take_in("ADDED", pod(state=CREATING))
    seen.take_in("ADDED", event("another-actor-0-abcde", "FailedMount", "x"))
    assert seen.waits() == {}
    seen.take_in("ADDED", event(f"{RUN}-actor-0-abcde", "FailedMount", "x"))
    assert seen.waits() == {"FailedMount: x": ["actor[0]"]}


def test_losses_are_kept_though_the_pod_is_gone_and_another_has_its_name() -> None:
    seen = sight()
    killed = ended(137, "OOMKilled", uid="1")
    seen.take_in("ADDED", killed)
    killed["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    seen.take_in("DELETED", killed)
    seen.take_in("ADDED", running(uid="2", deleted=True))
    assert seen.losses == {
        f"{RUN}-actor-0": ["was killed: out of memory (limit 64Mi)", "was deleted"]
    }
    drained = condition("DisruptionTarget", "True", "EvictionByEvictionAPI")
    seen.take_in("MODIFIED", pod(uid="2", deleted=True, conditions=(drained,)))
    assert seen.losses[f"{RUN}-actor-0"][1] == "was evicted, as by a drain of its machine"


def test_an_event_that_comes_late_explains_a_loss() -> None:
    seen = sight()
    seen.take_in("ADDED", running())
    assert seen.losses == {}
    seen.take_in("ADDED", event(f"{RUN}-actor-0-abcde", "NodeNotReady", "Node is not ready"))
    assert [*seen.losses] == [f"{RUN}-actor-0"]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (ended(75), []),
        (running(deleted=True), ["was deleted"]),
        (ended(137), ["was killed by SIGKILL"]),
    ],
)
def test_a_machine_that_was_away_for_a_moment_is_no_reason_for_a_later_end(
    end: dict[str, Any], expected: list[str]
) -> None:
    seen, host = sight(), f"{RUN}-actor-0"
    away = event(f"{host}-abcde", "NodeNotReady", "Node is not ready")
    seen.take_in("ADDED", ready("True", FIRST))
    seen.take_in("ADDED", {**away, "lastTimestamp": EARLIER})
    seen.take_in("MODIFIED", ready("False", EARLIER))
    assert "which is lost" in seen.losses[host][0]
    seen.take_in("MODIFIED", ready("True", LATER))
    assert host not in seen.losses
    assert seen.interruption("SIGTERM to actor[0]") == "SIGTERM to actor[0]"
    seen.take_in("MODIFIED", end)
    assert seen.losses.get(host, []) == expected


def test_a_pod_that_its_machine_has_seen_well_all_the_time_is_not_lost() -> None:
    seen, host = sight(), f"{RUN}-actor-0"
    away = event(f"{host}-abcde", "NodeNotReady", "Node is not ready")
    seen.take_in("ADDED", ready("True", FIRST))
    seen.take_in("ADDED", {**away, "lastTimestamp": EARLIER})
    assert "which is lost" in seen.losses[host][0]
    seen.take_in("MODIFIED", ready("False", EARLIER))
    seen.take_in("MODIFIED", ready("True", FIRST))
    assert host not in seen.losses
    seen.take_in("MODIFIED", {**away, "lastTimestamp": LATER})
    assert "which is lost" in seen.losses[host][0]


def test_the_newest_supervisor_counts() -> None:
    seen = sight()
    assert seen.supervisor is None
    old, new = (supervisor(uid=uid, created=at) for uid, at in (("1", FIRST), ("2", EARLIER)))
    seen.take_in("ADDED", new)
    seen.take_in("ADDED", old)
    assert seen.supervisor == new
    seen.take_in("DELETED", old)
    assert seen.is_gone(old)
    assert not seen.is_gone(new)
    assert seen.losses == {}


def test_a_supervisor_that_is_gone_is_newer_than_a_dead_one_that_is_still_there() -> None:
    seen = sight()
    dead = supervisor(uid="1", created=FIRST, state=terminated(137))
    newer = supervisor(uid="2", created=EARLIER)
    for each in (dead, newer):
        seen.take_in("ADDED", each)
    seen.take_in("DELETED", newer)
    assert seen.supervisor == newer


def test_the_newest_pod_of_a_node_counts_in_whatever_order_they_are_listed() -> None:
    seen, host = sight(), f"{RUN}-actor-0"
    new = ended(2, uid="2", created=EARLIER)
    old = ended(137, uid="1", created=FIRST)
    new["spec"]["nodeName"] = "machine-2"
    for each in (new, old):
        seen.take_in("ADDED", each)
    seen.take_in("ADDED", job(failed=2, failedIndexes="0"))
    assert seen.failed() == {"actor[0]": new}
    assert seen.machine(host) == "machine-2"
    assert seen.losses == {host: ["was killed by SIGKILL", "ended with exit code 2"]}


@pytest.mark.parametrize("kind", ["FailureTarget", "Failed"])
def test_a_run_that_had_all_the_time_it_may_have_says_so(kind: str) -> None:
    seen = sight()
    text = "Job was active longer than specified deadline"
    for reason in ("PodFailurePolicy", "DeadlineExceeded"):
        seen.take_in("MODIFIED", job(RUN, condition(kind, "True", reason, text)))
        said = seen.interruption("SIGTERM")
        assert ("max_run_s" in said and text in said) == (reason == "DeadlineExceeded")
    seen.take_in("MODIFIED", job(RUN, condition(kind, "False", "DeadlineExceeded", text)))
    assert seen.interruption("SIGTERM") == "SIGTERM"


# What is said in the end


def lost(host: str) -> NodeFailure:
    return NodeFailure("actor[0]", host, "its connection broke", host_lost=True)


def test_a_result_says_what_the_cluster_knows_of_lost_pods() -> None:
    host = f"{RUN}-actor-0"
    raised = NodeFailure("learner[0]", f"{RUN}-learner-0", "ValueError: x")
    restarts = tuple(Restart("actor[0]", i, 0.0, 0.0, lost(host)) for i in (1, 2))
    result = ProgramResult(
        Outcome.FAILED, (lost(host), lost("h2"), lost("h3"), raised), "", None, (), restarts
    )
    losses = {host: ["was evicted", "was killed: out of memory (limit 64Mi)"]}
    found = explained(result, losses, lambda name: "machine-7" if name == "h2" else "")
    assert [each.summary for each in found.failures] == [
        f"its pod {host} was killed: out of memory (limit 64Mi)",
        "its connection broke (its pod was on the machine machine-7)",
        "its connection broke",
        "ValueError: x",
    ]
    assert [each.failure and each.failure.summary for each in found.restarts] == [
        f"its pod {host} was evicted",
        f"its pod {host} was killed: out of memory (limit 64Mi)",
    ]


def test_how_nodes_are_is_told_of_their_pods_while_the_supervisor_says_nothing() -> None:
    seen = sight()
    seen.take_in("ADDED", running(f"{RUN}-actor-0"))
    seen.take_in("ADDED", pod(f"{RUN}-actor-1", conditions=(UNSCHEDULABLE,)))
    found = [(each.name, each.state, each.waits_for) for each in seen.status()]
    why = "Unschedulable: 2 Insufficient gpu."
    assert found[:2] == [("actor[0]", "starting", ""), ("actor[1]", "pending", why)]
    seen.take_in("ADDED", job(RUN, FAILED, failed=1))
    assert [each.state for each in seen.status()] == ["starting", "ended", "ended"]


def test_a_supervisor_whose_pod_was_deleted_says_so_though_it_ended_as_it_was_told() -> None:
    seen = sight()
    seen.take_in("ADDED", ended(1, host=RUN, container="supervisor", deleted=True))
    assert seen.interruption("SIGTERM") == f"SIGTERM: its supervisor's pod {RUN}-abcde was deleted"
