"""What a program in a cluster does when one of its parts, or the cluster, fails.

The API is that of the bed, pods are real. What any engine must do is in `host_contract`; pods that
are killed at random are in `test_host_chaos`. Of each fault the seconds are measured until the
launcher has ended, or until calls go on; `pytest -s` shows them.
"""

import re
import signal
import time
from typing import Any

import pytest

from launchpad_lite.testing import poll_until
from tests.engines import needs_kubernetes
from tests.launchers.host_engines import WITHIN_S, Command, KubernetesDesk

pytestmark = [needs_kubernetes, pytest.mark.slow, pytest.mark.timeout(300)]

_MOVING: dict[str, Any] = {"restart": 100, "how": {"patient": True}}
#: The machine of pods.
_SECOND = {"node_selector": {"kubernetes.io/hostname": "node-2"}}
_NO_IMAGE = "localhost/none:1"


def checkpoints(desk: KubernetesDesk, every_s: float | None) -> list[Any]:
    return [str(desk.there / "state"), every_s]


def restarted(run: Command) -> list[str]:
    return sorted(node for node, _ in run.result["restarts"])


# A node's pod goes


def test_a_pod_out_of_memory_is_named_and_replaced(kubernetes: KubernetesDesk) -> None:
    # With `ram=`, allocations would fail before.
    limits = {"limits": {"memory": "256Mi"}}
    little = {"patch": {"spec": {"containers": [{"name": "node", "resources": limits}]}}}
    run = kubernetes.begin(pods=kubernetes.pods(store=little), **_MOVING)
    run.say("eat")
    run.await_restart("store[0]")
    run.await_calls()
    run.finish()
    ((node, summary),) = run.result["restarts"]
    assert node == "store[0]"
    # The agent may have told first, in the moment before it was killed as well.
    assert re.search(r"out of memory \((limit 256Mi|it had up to \d+ MiB)\)", summary), summary


# A pod does not come


def test_all_that_pods_wait_for_is_told_and_ends_the_launch(kubernetes: KubernetesDesk) -> None:
    kubernetes.cluster.pending(lambda pod: "store" in pod["metadata"]["name"])
    pods = kubernetes.pods(caller={"image": _NO_IMAGE})
    run = kubernetes.launch(schedule_s=10, pods=pods)
    for index in range(2):  # in one line, or each in its own if the cluster tells of them apart
        run.until(rf"launchpad: .*caller\[{index}\].* waits?: (ErrImagePull|ImagePullBackOff)")
    run.until(r"launchpad: .*store\[0\].* waits?: .*Insufficient nvidia.com/gpu")
    refusal = run.refusal()
    assert re.search(r"within 10 s: (.|\n)*ImagePullBackOff", refusal), refusal
    assert re.search(r"store.*Unschedulable.*Insufficient nvidia.com/gpu", refusal), refusal
    kubernetes.assert_nothing_is_left()


# Pods are told to go


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("evict supervisor", r"supervisor's pod \S+ was evicted"),
        ("delete counting-store", "its pod counting-store-0 was deleted"),
    ],
)
def test_what_somebody_ends_ends_a_program_without_a_policy_in_order(
    kubernetes: KubernetesDesk, what: str, told: str
) -> None:
    run = kubernetes.begin()
    how, name = what.split()
    run.strike()
    if how == "evict":
        kubernetes.cluster.evict(kubernetes.pod(name))
    else:
        kubernetes.cluster.delete("jobs", name)
    assert run.end() == 128 + signal.SIGTERM
    assert run.result["outcome"] == "INTERRUPTED"
    assert run.said(rf"launchpad: the program was ended: .*{told}")
    if what == "evict supervisor":
        assert run.said(r"\[caller\[0\]\] \d+ calls, 0 lost")
    kubernetes.assert_nothing_is_left()


def test_nodes_of_a_drained_machine_come_back_elsewhere(kubernetes: KubernetesDesk) -> None:
    run = kubernetes.begin(
        checkpoints=checkpoints(kubernetes, None),
        pods=kubernetes.pods(supervisor=_SECOND),
        **_MOVING,
    )
    nodes = sorted(run.status())
    moving = [node for node in nodes if kubernetes.machine(node) == "node-1"]
    assert moving
    kubernetes.cluster.drain("node-1")
    for node in moving:
        run.await_restart(node)
    if "store[0]" in moving:
        run.until(r"\[store\[0\]\] restored")
    run.await_calls()
    run.finish()
    assert restarted(run) == moving
    for _, summary in run.result["restarts"]:
        assert "was asked from outside to end" in summary
        assert "was evicted, as by a drain of its machine" in summary


# The supervisor goes


def test_a_program_begins_anew_when_its_supervisor_is_lost(kubernetes: KubernetesDesk) -> None:
    run = kubernetes.begin(checkpoints=checkpoints(kubernetes, 0.2), **_MOVING)
    poll_until(lambda: [*(kubernetes.shared / "state").rglob("0*/**/total")], WITHIN_S)
    kubernetes.cluster.kill_container(kubernetes.pod("supervisor"))
    run.until("the program starts again")
    run.until(r"\[store\[0\]\] restored")
    run.await_calls()
    run.finish()
    assert run.result["outcome"] == "COMPLETED"


# The network goes


def test_a_short_cut_a_deleted_secret_and_a_launcher_that_stands_still_do_no_harm(
    kubernetes: KubernetesDesk,
) -> None:
    options: dict[str, Any] = {"launcher_silence_s": 20, "silence_s": 30}
    run = kubernetes.begin(how={"timing": {"beat_s": 3}}, **options)
    pod = kubernetes.pod("caller[0]")
    kubernetes.cluster.cut(pod)
    time.sleep(1)  # what is measured is that nothing comes of it
    kubernetes.cluster.heal(pod)
    run.await_calls()

    run.process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # what is measured is that nothing comes of it
    run.process.send_signal(signal.SIGCONT)
    run.await_calls()

    kubernetes.cluster.delete("secrets", "counting-trust")
    run.await_calls()
    run.finish()
    assert run.result["restarts"] == []


# The launcher goes, or is not there

_DIES = """
    from launchers.kubernetes._client import Api

    create = Api.create

    def create_and_die(api, obj, **how):
        made = create(api, obj, **how)
        if obj["kind"] == "Job" and obj["metadata"]["name"] == "counting-store":
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    Api.create = create_and_die
"""


def test_nothing_is_left_of_a_run_whose_launcher_is_killed_while_it_creates_it(
    kubernetes: KubernetesDesk,
) -> None:
    run = kubernetes.launch(_DIES, schedule_s=3, ttl_s=1)
    assert run.end() == -signal.SIGKILL
    run.strike()
    jobs = {job["metadata"]["name"] for job in kubernetes.cluster.objects("Job")}
    assert "counting-store" in jobs
    kubernetes.assert_nothing_is_left()
    run.note("nothing was left")


# A machine does not answer, and its pods are given up


@pytest.mark.parametrize("how", ["cut_node", "stop_kubelet"])
def test_a_node_comes_back_elsewhere_only_when_it_is_certain_that_it_does_not_run(
    kubernetes: KubernetesDesk, how: str
) -> None:
    pods = kubernetes.pods(supervisor=_SECOND, caller=_SECOND)
    doing = {"patient": True, "timing": {"stuck_s": 2.0}}
    run = kubernetes.begin(restart=100, notice_s=1, pods=pods, how=doing)
    before = kubernetes.pod("store[0]")
    assert kubernetes.machine("store[0]") == "node-1"
    getattr(kubernetes.cluster, how)("node-1")
    kubernetes.cluster.give_up_node("node-1")
    if how == "stop_kubelet":
        run.until(rf"machine node-1 does not answer; pod {before} is replaced when it is back")
        run.await_calls()  # by the same pod
        assert run.status()["store[0]"][2] == 0
        kubernetes.cluster.heal_node("node-1")
    else:
        run.until(rf"pod {before} is removed, because its machine does not answer")
    run.await_restart("store[0]")
    run.await_calls()
    assert kubernetes.machine("store[0]") == "node-2"
    kubernetes.cluster.heal_node("node-1")
    run.finish()
    assert restarted(run) == ["store[0]"]


def test_a_program_begins_anew_when_the_machine_of_its_supervisor_is_lost(
    kubernetes: KubernetesDesk,
) -> None:
    run = kubernetes.begin(
        restart=100,
        notice_s=1,
        checkpoints=checkpoints(kubernetes, 0.2),
        pods=kubernetes.pods(store=_SECOND, caller=_SECOND),
        launcher_silence_s=8,
        how={"patient": True, "timing": {"stuck_s": 2.0, "beat_s": 2}},
    )
    assert kubernetes.machine("supervisor") == "node-1"
    before = kubernetes.pod("supervisor")
    kubernetes.cluster.cut_node("node-1")
    kubernetes.cluster.give_up_node("node-1")
    run.until(rf"pod {before} is removed, because its machine does not answer")
    run.until(r"the program starts again")
    run.until(r"\[store\[0\]\] restored")
    run.await_calls()
    assert kubernetes.machine("supervisor") == "node-2"
    kubernetes.cluster.heal_node("node-1")
    run.finish()
