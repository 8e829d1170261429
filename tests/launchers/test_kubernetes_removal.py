"""When pods that do not leave their machines may be removed, from what was seen and heard of them."""

from typing import Any

import pytest

import launchpad_lite as lp
from launchers._kubernetes.removal import Departures, Fate
from launchpad_lite.launching import NodeStatus, RestartPolicy

#: As they are in truth; the time is the test's own.
STUCK_S = 20.0
SILENCE_S, LAUNCHER_SILENCE_S, SCHEDULE_S = 30.0, 300.0, 600.0
FIRST, SECOND = "demo-actor-0", "demo-actor-1"


class Node:
    def run(self) -> None: ...


class Scene:
    """A run of two nodes, on a machine each, with their supervisor on a third; and a clock."""

    def __init__(self, when: str = "on_failure", notice_s: float = 60.0) -> None:
        program = lp.Program("demo")
        with program.group("actor"):
            for _ in range(2):
                program.add_node(lp.PyClassNode(Node))
        restart = RestartPolicy("on_failure") if when == "on_failure" else RestartPolicy("never")
        plan = lp.plan(program, "local_mp", restart=restart)
        self.now = 1000.0
        self.departures = Departures(
            {f"demo-{each.label}-{each.replica}": each for each in plan.executables},
            silence_s=SILENCE_S,
            launcher_silence_s=LAUNCHER_SILENCE_S,
            schedule_s=SCHEDULE_S,
            notice_s=notice_s,
        )
        self.supervisor = pod("demo-s", "s", "supervisor")
        self.first, self.second = pod(FIRST, "1"), pod(SECOND, "2")
        self.departures.begin(self.now)
        for each in (self.supervisor, self.first, self.second):
            self.see(each)
        self.departures.note_up()
        self.say()

    def see(self, one: dict[str, Any], change: Any = "MODIFIED", **fields: Any) -> dict[str, Any]:
        """Takes in a pod, with other metadata, or ended with a code."""
        one = {**one, "metadata": {**one["metadata"], **fields}}
        container = "supervisor" if one["metadata"]["uid"].startswith("s") else "node"
        self.departures.take_in(change, one, container, self.now)
        return one

    def end(self, one: dict[str, Any], code: int) -> None:
        status = {"name": "node", "state": {"terminated": {"exitCode": code}}}
        self.see({**one, "status": {"phase": "Failed", "containerStatuses": [status]}})

    def delete(self, one: dict[str, Any], grace_s: float = 10.0) -> None:
        self.see(one, deletionTimestamp="now", deletionGracePeriodSeconds=grace_s)

    def say(self, state: str = "running", restarts: int = 0, pid: int | None = 12) -> None:
        """Says how the first node is; the other runs."""
        nodes = [
            NodeStatus("actor[0]", state, FIRST, pid, {}, restarts),
            NodeStatus("actor[1]", "running", SECOND, 12, {}),
        ]
        self.departures.take_in_status(nodes, self.now)

    def after(self, seconds: float) -> list[tuple[str, Fate]]:
        """Returns what becomes of which pod, as it is seen within so many seconds."""
        found: list[tuple[str, Fate]] = []
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, max(self.now + 0.5, self.departures.look_at))
            found += [
                (one["metadata"]["uid"], fate) for one, fate in self.departures.fates(self.now)
            ]
        return found


def pod(host: str, uid: str, container: str = "node") -> dict[str, Any]:
    return {
        "metadata": {"name": f"{host}-x", "uid": uid},
        "spec": {"hostname": host, "nodeName": f"machine-of-{uid}"},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": container, "state": {"running": {}}}],
        },
    }


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_pods_that_leave_as_they_are_told_are_no_matter(scene: Scene) -> None:
    scene.delete(scene.first)
    scene.delete(scene.second)
    scene.end(scene.first, 75)
    scene.see(scene.second, "DELETED")
    assert scene.departures.look_at == float("inf")


def test_a_node_that_works_is_waited_for_without_end_and_told_once(scene: Scene) -> None:
    scene.delete(scene.first)
    assert scene.after(10_000.0) == [("1", Fate.REPLACED_LATER)]


def test_nothing_is_told_of_a_node_within_its_notice(scene: Scene) -> None:
    scene.delete(scene.first, grace_s=600.0)
    assert scene.after(600.0) == []


@pytest.mark.parametrize("grace_s", [600.0, 30 * 24 * 3600.0])
def test_a_node_that_is_lost_is_not_waited_for_as_long_as_its_notice(
    scene: Scene, grace_s: float
) -> None:
    scene.delete(scene.first, grace_s)
    scene.say("restarting")
    scene.say("starting", restarts=1)  # with the process that it had
    assert scene.after(SILENCE_S + STUCK_S - 1.0) == []
    assert scene.after(2.0) == [("1", Fate.REMOVED)]
    scene.departures.forget(scene.first)
    assert scene.after(1000.0) == []


def test_a_node_that_starts_again_in_its_pod_is_at_work(scene: Scene) -> None:
    scene.delete(scene.first)
    scene.say("restarting")
    scene.after(1.0)
    scene.say("starting", restarts=1, pid=40)
    assert scene.after(1000.0) == [("1", Fate.REPLACED_LATER)]


def test_a_node_in_another_pod_is_at_work_though_its_process_has_the_same_number(
    scene: Scene,
) -> None:
    scene.see(scene.first, "DELETED")
    scene.say("starting", restarts=1)
    again = scene.see(pod(FIRST, "3"))
    scene.say("starting", restarts=1)
    scene.delete(again)
    assert scene.after(1000.0) == [("3", Fate.REPLACED_LATER)]


def test_a_pod_that_could_not_be_removed_is_tried_again(scene: Scene) -> None:
    scene.delete(scene.first)
    scene.say("restarting")
    assert scene.after(2 * (SILENCE_S + STUCK_S))[:2] == [("1", Fate.REMOVED)] * 2


def test_a_node_that_does_not_come_back_gets_no_other_pod() -> None:
    scene = Scene("never")
    scene.delete(scene.first)
    scene.say("ended")
    assert scene.after(1000.0) == [("1", Fate.ENDS_LATER)]


def test_what_a_supervisor_said_counts_no_more_when_it_is_to_leave_itself(scene: Scene) -> None:
    scene.delete(scene.supervisor)
    scene.delete(scene.first)
    scene.say("restarting")
    assert ("1", Fate.REMOVED) not in scene.after(LAUNCHER_SILENCE_S)


def test_a_supervisor_is_gone_when_all_others_have_lost_it(scene: Scene) -> None:
    scene.delete(scene.supervisor, grace_s=600.0)
    scene.end(scene.first, 75)
    assert scene.after(100.0) == []
    scene.end(scene.second, 75)
    scene.see(pod(FIRST, "3"))  # they wait for another one
    scene.see(pod(SECOND, "4"))
    assert scene.after(STUCK_S + 2.0) == [("s", Fate.REMOVED)]


def test_pods_that_are_to_leave_say_nothing_of_their_supervisor(scene: Scene) -> None:
    scene.delete(scene.supervisor, grace_s=600.0)
    scene.delete(scene.first)
    scene.end(scene.second, 75)
    assert ("s", Fate.REMOVED) in scene.after(2 * STUCK_S + 2.0)


def test_no_pod_elsewhere_says_nothing_of_a_supervisor() -> None:
    scene = Scene()
    for each in (scene.first, scene.second):
        each["spec"]["nodeName"] = scene.supervisor["spec"]["nodeName"]
    scene.delete(scene.supervisor)
    for each in (scene.first, scene.second):
        scene.end(each, 75)
    assert scene.after(LAUNCHER_SILENCE_S) == [("s", Fate.REPLACED_LATER)]


def test_a_supervisor_is_gone_when_it_must_have_missed_its_launcher(scene: Scene) -> None:
    scene.delete(scene.supervisor)
    assert scene.after(LAUNCHER_SILENCE_S + 60.0) == [("s", Fate.REPLACED_LATER)]
    assert scene.after(60.0)[:1] == [("s", Fate.REMOVED)]


def test_a_supervisor_whose_nodes_end_when_they_like_may_run_for_ever() -> None:
    scene = Scene(notice_s=-1.0)
    scene.delete(scene.supervisor)
    assert scene.after(10_000.0) == [("s", Fate.REPLACED_LATER)]


def test_a_supervisor_that_places_nodes_does_not_look_for_its_launcher_yet(scene: Scene) -> None:
    scene.see(scene.supervisor, "DELETED")
    again = scene.see(pod("demo-s", "s2", "supervisor"))
    scene.departures.begin(scene.now)
    scene.delete(again)
    assert scene.after(LAUNCHER_SILENCE_S + SCHEDULE_S) == [("s2", Fate.REPLACED_LATER)]
    assert ("s2", Fate.REMOVED) in scene.after(SCHEDULE_S + 100.0)


def test_pods_of_a_supervisor_that_is_gone_are_not_waited_for_by_the_next(scene: Scene) -> None:
    scene.delete(scene.supervisor)
    scene.delete(scene.first)
    scene.after(100.0)
    scene.see(scene.supervisor, "DELETED")
    scene.see(pod("demo-s", "s2", "supervisor"))
    scene.departures.begin(scene.now)
    scene.say("starting", pid=None)
    assert scene.after(SILENCE_S + STUCK_S - 1.0) == []
    assert ("1", Fate.REMOVED) in scene.after(3.0)


def test_pods_beside_a_supervisor_that_was_cut_off_run_for_as_long_as_it_may() -> None:
    scene = Scene(notice_s=10.0)
    scene.first["spec"]["nodeName"] = scene.supervisor["spec"]["nodeName"]
    scene.delete(scene.supervisor)
    scene.delete(scene.first)
    given_up_at = scene.now
    scene.end(scene.second, 75)
    assert ("s", Fate.REMOVED) in scene.after(2 * STUCK_S + 2.0)
    scene.departures.forget(scene.supervisor)
    scene.see(pod("demo-s", "s2", "supervisor"))
    scene.departures.begin(scene.now)
    scene.say("starting", pid=None)
    latest = given_up_at + LAUNCHER_SILENCE_S + 10.0  # with its notice
    assert ("1", Fate.REMOVED) not in scene.after(latest + SILENCE_S - scene.now)
    assert ("1", Fate.REMOVED) in scene.after(3 * STUCK_S)


@pytest.mark.parametrize("when", ["never", "on_failure"])
def test_a_program_that_has_ended_does_not_begin_anew(when: str) -> None:
    scene = Scene(when)
    scene.delete(scene.supervisor)
    for each in (scene.first, scene.second):
        scene.end(each, 0)
    assert scene.after(60.0)[0] == ("s", Fate.PROGRAM_ENDED)


def test_a_program_that_may_not_begin_anew_ends_with_its_supervisor() -> None:
    scene = Scene("never")
    scene.delete(scene.supervisor, grace_s=600.0)
    for each in (scene.first, scene.second):
        scene.end(each, 75)
    assert scene.after(2 * STUCK_S + 2.0)[0] == ("s", Fate.PROGRAM_LOST)
    alone = Scene("never")
    alone.delete(alone.supervisor, grace_s=70.0)
    assert alone.after(70.0 + STUCK_S - 1.0) == []
    assert alone.after(2.0)[0] == ("s", Fate.PROGRAM_LOST)
