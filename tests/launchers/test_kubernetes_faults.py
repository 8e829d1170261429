"""What a program in a cluster does when one of its parts, or the cluster, fails.

The API is that of the bed, pods are real. What any engine must do is in `host_contract`; pods that
are killed at random are in `test_host_chaos`. Of each fault the seconds are measured until the
launcher has ended, or until calls go on; `pytest -s` shows them.
"""

import json
import random
import re
import signal
import time
import urllib.request
from typing import Any

import pytest

from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.cluster import BARE_IMAGE, KubernetesCluster
from tests.engines import needs_kubernetes
from tests.launchers.host_engines import WITHIN_S, Command, KubernetesDesk

pytestmark = [needs_kubernetes, pytest.mark.slow, pytest.mark.timeout(300)]

_MOVING: dict[str, Any] = {"restart": 100, "how": {"patient": True}}
#: Machines of pods.
_FIRST, _SECOND = (
    {"node_selector": {"kubernetes.io/hostname": name}} for name in ("node-1", "node-2")
)
_NO_IMAGE = "localhost/none:1"


def checkpoints(desk: KubernetesDesk, every_s: float | None) -> list[Any]:
    return [str(desk.there / "state"), every_s]


def delete(cluster: KubernetesCluster, kind: str, name: str) -> None:
    """As `kubectl delete`."""
    group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
    config = json.loads(cluster.kubeconfig.read_text())
    request = urllib.request.Request(
        f"{config['clusters'][0]['cluster']['server']}{group}"
        f"/namespaces/{cluster.namespace}/{kind}/{name}",
        data=json.dumps({"propagationPolicy": "Background"}).encode(),
        headers={
            "Authorization": f"Bearer {config['users'][0]['user']['token']}",
            "Content-Type": "application/json",
        },
        method="DELETE",
    )
    urllib.request.urlopen(request).close()


def restarted(run: Command) -> list[str]:
    return sorted(node for node, _ in run.result["restarts"])


# A node's pod goes


def test_a_killed_pod_is_replaced_under_the_same_name(kubernetes: KubernetesDesk) -> None:
    run = kubernetes.begin(**_MOVING)
    before = kubernetes.pod("store[0]")
    kubernetes.cluster.expire_versions()  # the server has forgotten all versions that are known
    kubernetes.cluster.drop_watches()
    kubernetes.cluster.fail_requests(410, 3, "watch")
    kubernetes.cluster.kill_container(before)
    run.await_restart("store[0]", "counting-store-0")
    run.await_calls()
    assert kubernetes.pod("store[0]") != before
    assert kubernetes.cluster.resolve("counting-store-0.counting-store")
    kubernetes.cluster.expire_versions()
    run.finish()
    assert run.result["restarts"] == [["store[0]", kubernetes.killed]]


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


def test_an_image_that_does_not_exist_is_named_at_once_and_ends_the_launch(
    kubernetes: KubernetesDesk,
) -> None:
    run = kubernetes.launch(schedule_s=8, image=_NO_IMAGE)
    run.until(rf"launchpad: .*supervisor.* waits?: (ErrImagePull|ImagePullBackOff).*{_NO_IMAGE}")
    words = r"not all nodes were placed within 8 s: .*ImagePullBackOff"
    assert re.search(words, run.refusal()), run.output
    kubernetes.assert_nothing_is_left()


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


def test_pods_that_wait_for_room_start_once_there_is_some(kubernetes: KubernetesDesk) -> None:
    kubernetes.cluster.pending(lambda pod: "caller-1" in pod["metadata"]["name"])
    run = kubernetes.launch()
    run.until(r"launchpad: caller\[1\] waits: .*Insufficient nvidia.com/gpu")
    run.strike()
    kubernetes.cluster.schedule()
    run.await_calls()
    run.finish()


def test_a_quota_ends_the_launch_and_is_named(kubernetes: KubernetesDesk) -> None:
    kubernetes.cluster.limit_pods(2)
    run = kubernetes.launch(schedule_s=8)
    run.until(r"launchpad: .* waits?: FailedCreate: .*exceeded quota")
    assert re.search(r"within 8 s: .*exceeded quota", run.refusal()), run.output
    kubernetes.assert_nothing_is_left()


# The API fails


def test_each_line_is_shown_once_and_in_order_though_connections_break(
    kubernetes: KubernetesDesk,
) -> None:
    count = 3000
    run = kubernetes.launch(how={"lines": count})
    cuts = 0
    chance = random.Random(7)

    def is_followed() -> bool:
        assert run.process.poll() is None, run.story
        return kubernetes.cluster.open_streams().get("log", 0) > 0

    while any(run.told(f"printed{index}") != count for index in range(2)):
        assert poll_until(is_followed, WITHIN_S, must=False), run.story
        time.sleep(chance.uniform(0, 0.5))  # a time at which it does not expect it
        cuts += kubernetes.cluster.drop_logs()
        kubernetes.cluster.drop_watches()
    assert cuts >= 3
    run.finish()
    print(f"{cuts} cuts", end="")
    for index in range(2):
        lines = [f"line {number}" for number in range(1, count + 1)]
        shown = re.findall(rf"^\[caller\[{index}\]\] (line \d+)$", run.output, re.MULTILINE)
        assert shown == lines
        log = kubernetes.log(f"caller/{index}")
        assert re.findall(r"^line \d+$", log, re.MULTILINE) == lines


def test_requests_that_fail_in_passing_are_made_again(kubernetes: KubernetesDesk) -> None:
    for status in (409, 429, 500):
        changes = ["PATCH", "DELETE"] if status == 409 else ["POST", "PATCH", "DELETE", "GET"]
        for part in changes:
            kubernetes.cluster.fail_requests(status, 1, part)
    run = kubernetes.begin()
    run.finish()
    assert not run.said("Traceback")


def test_a_program_goes_on_while_the_server_is_away(kubernetes: KubernetesDesk) -> None:
    run = kubernetes.begin(how={"lines": 50_000})  # more than it prints until the end
    away_s = 8
    until = time.monotonic() + away_s
    cluster = kubernetes.cluster
    cluster.fail_requests(503, 1 << 20, lambda method, path: time.monotonic() < until)
    cluster.drop_logs()
    cluster.drop_watches()
    before = run.told("caller0")["calls"]
    poll_until(lambda: time.monotonic() > until, 2 * away_s)
    assert run.told("caller0")["calls"] > before
    run.strike()
    run.await_calls()
    printed = len(re.findall(r"\[caller\[0\]\] line", run.output))
    run.until(rf"\[caller\[0\]\] line {printed + 1}\n")
    run.finish()


# Pods are told to go


def test_an_evicted_node_saves_its_state_and_comes_back_without_a_failure(
    kubernetes: KubernetesDesk,
) -> None:
    run = kubernetes.begin(checkpoints=checkpoints(kubernetes, None), **_MOVING)
    total = run.told("caller0")["total"]
    kubernetes.cluster.evict(kubernetes.pod("store[0]"))
    run.await_restart("store[0]")
    run.until(r"\[store\[0\]\] restored")
    run.await_calls()
    assert run.told("caller0")["total"] > total
    run.finish()
    ((node, summary),) = run.result["restarts"]
    assert node == "store[0]"
    assert "was asked from outside to end" in summary
    assert "its pod counting-store-0 was evicted" in summary


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("evict store[0]", r"its pod counting-store-0 was evicted, as by a drain"),
        ("evict supervisor", r"supervisor's pod \S+ was evicted"),
        ("delete counting", "the run was deleted"),
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
        delete(kubernetes.cluster, "jobs", name)
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
    run.await_calls()
    run.finish()
    assert restarted(run) == moving


# The supervisor goes


def test_the_loss_of_the_supervisor_ends_the_program(kubernetes: KubernetesDesk) -> None:
    run = kubernetes.begin()
    pod = kubernetes.pod("supervisor")
    run.strike()
    kubernetes.cluster.kill_container(pod)
    assert run.end() == 1
    assert run.said(rf"its supervisor's pod {pod} was killed by SIGKILL")
    kubernetes.assert_nothing_is_left()


@pytest.mark.parametrize("how", ["kill_container", "drain"])
def test_a_program_begins_anew_when_its_supervisor_is_lost(
    kubernetes: KubernetesDesk, how: str
) -> None:
    run = kubernetes.begin(checkpoints=checkpoints(kubernetes, 0.2), **_MOVING)
    poll_until(lambda: [*(kubernetes.shared / "state").rglob("0*/**/total")], WITHIN_S)
    lost = "supervisor"
    what = kubernetes.machine(lost) if how == "drain" else kubernetes.pod(lost)
    getattr(kubernetes.cluster, how)(what)
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

    delete(kubernetes.cluster, "secrets", "counting-trust")
    run.await_calls()
    run.finish()
    assert run.result["restarts"] == []


def test_a_pod_that_is_cut_off_is_replaced(kubernetes: KubernetesDesk) -> None:
    run = kubernetes.begin(**_MOVING)
    kubernetes.cluster.cut(kubernetes.pod("store[0]"))
    run.await_restart("store[0]")
    run.await_calls()
    run.finish()
    assert restarted(run) == ["store[0]"]


def test_nodes_of_a_machine_that_was_cut_off_come_back_with_it(kubernetes: KubernetesDesk) -> None:
    pods = kubernetes.pods(supervisor=_FIRST, caller=_FIRST, store=_SECOND)
    run = kubernetes.begin(pods=pods, **_MOVING)
    kubernetes.cluster.cut_node("node-2")
    run.until(r"store\[0\] waits for a new pod")
    run.strike()
    kubernetes.cluster.heal_node("node-2")
    run.await_restart("store[0]")
    run.await_calls()
    run.finish()
    assert restarted(run) == ["store[0]"]


# The launcher goes, or is not there

_DIES = """
    from launchers._kubernetes.client import Api

    create = Api.create

    def create_and_die(api, obj, **how):
        made = create(api, obj, **how)
        if obj["kind"] == "Job" and obj["metadata"]["name"] == "counting-store":
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    Api.create = create_and_die
"""
_DETACHED = """
    if __name__ == "__main__":
        lp.launch(make_program(), LAUNCHER, detach=True, **OPTIONS)
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


def await_end_of_pods(kubernetes: KubernetesDesk) -> None:
    """Waits until no pod of a node runs, or is going to."""

    def have_ended() -> bool:
        jobs = [
            each
            for each in kubernetes.cluster.objects("Job")
            if each["metadata"]["name"] != "counting"
        ]
        conditions = [each["status"].get("conditions") or [] for each in jobs]
        ends = ("Complete", "Failed")
        return all(any(each["type"] in ends for each in found) for found in conditions)

    poll_until(have_ended, WITHIN_S)
    kubernetes.cluster.restore()  # nobody waits for it


def test_pods_of_a_detached_run_do_not_wait_without_end_for_a_supervisor(
    kubernetes: KubernetesDesk,
) -> None:
    impatient = """
        from launchers._kubernetes import objects
        objects.LONGEST_BACKOFF_S = 0
    """
    pods = kubernetes.pods(supervisor={"image": BARE_IMAGE})  # which it cannot run in
    options: dict[str, Any] = {"restart": "on_failure", "schedule_s": 2, "pods": pods}
    kubernetes.launch(impatient, _DETACHED, **options).check()
    await_end_of_pods(kubernetes)


def test_a_detached_run_ends_after_its_longest_time(kubernetes: KubernetesDesk) -> None:
    options: dict[str, Any] = {"restart": "on_failure", "max_run_s": 5, "notice_s": 1}
    kubernetes.launch(_DETACHED, **options).check()
    await_end_of_pods(kubernetes)


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


def begin_with_supervisor_apart(kubernetes: KubernetesDesk, restart: int | str) -> Command:
    """Launches so that only the supervisor is on node-1."""
    run = kubernetes.begin(
        restart=restart,
        notice_s=1,
        checkpoints=checkpoints(kubernetes, 0.2),
        pods=kubernetes.pods(store=_SECOND, caller=_SECOND),
        how={"patient": True, "timing": {"stuck_s": 2.0}},
    )
    assert kubernetes.machine("supervisor") == "node-1"
    return run


def test_a_program_begins_anew_when_the_machine_of_its_supervisor_is_lost(
    kubernetes: KubernetesDesk,
) -> None:
    run = begin_with_supervisor_apart(kubernetes, 100)
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


def test_without_a_policy_a_program_ends_with_the_machine_of_its_supervisor(
    kubernetes: KubernetesDesk,
) -> None:
    run = begin_with_supervisor_apart(kubernetes, "never")
    before = kubernetes.pod("supervisor")
    kubernetes.cluster.cut_node("node-1")
    kubernetes.cluster.give_up_node("node-1")
    run.until(rf"the machine node-1 of its supervisor is lost: its pod {before} was ended")
    kubernetes.cluster.heal_node("node-1")
    assert run.end() == 1
    assert not run.said("starts again")
    kubernetes.assert_nothing_is_left()


def test_a_program_goes_on_while_the_kubelet_of_its_supervisor_is_away(
    kubernetes: KubernetesDesk,
) -> None:
    run = begin_with_supervisor_apart(kubernetes, 100)
    before = kubernetes.pod("supervisor")
    kubernetes.cluster.stop_kubelet("node-1")
    kubernetes.cluster.give_up_node("node-1")
    run.until(rf"machine node-1 does not answer; pod {before} is replaced when it is back")
    calls = run.told("caller0")["calls"]
    run.await_calls()
    assert run.told("caller0")["calls"] > calls  # of the same caller
    kubernetes.cluster.heal_node("node-1")
    run.until(r"the program starts again")
    run.await_calls()
    run.finish()


def test_an_interrupt_while_containers_begin_does_not_take_their_notice(
    kubernetes: KubernetesDesk,
) -> None:
    run = kubernetes.launch()
    pods = kubernetes.cluster.pods
    poll_until(lambda: any(pod["status"].get("phase") == "Running" for pod in pods()))
    run.process.send_signal(signal.SIGINT)
    interrupted_at = time.monotonic()
    assert run.end() in (-signal.SIGINT, 130)
    assert time.monotonic() - interrupted_at < 10  # their notice is twice as long
    kubernetes.assert_no_object_is_left()
