"""What follows from what is seen and heard of a run, with a clock of the test's own."""

import dataclasses
import math
import signal
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.hosts.elsewhere import ProgramEnd
from launchers.kubernetes._client import ApiError
from launchers.kubernetes._names import Names
from launchers.kubernetes._records import Note, PrintedRecord, StatusRecord, Up
from launchers.kubernetes._state import Hands, RunState, WaitLimits
from launchers.kubernetes._timing import Timing
from launchpad_lite.launching import NodeFailure, NodeStatus, Outcome, ProgramResult, RestartPolicy
from launchpad_lite.life.events import KillAsked, StopAsked
from launchpad_lite.life.result import WORK_DONE
from tests.launchers.kubernetes_seen import (
    QUEUED,
    UNSCHEDULABLE,
    condition,
    event,
    job,
    pod,
    refused,
    running,
    terminated,
    waiting,
)

NAMES = Names.of("demo", ["actor"], "demo-x2x4z")
RUN = NAMES.run
FIRST, SECOND = f"{RUN}-actor-0", f"{RUN}-actor-1"
SUPERVISOR_MACHINE = "machine-s"
#: As they are in truth; the time is the test's own.
TIMING = Timing()
LIMITS = WaitLimits(notice_s=60.0, schedule_s=600.0, silence_s=30.0, launcher_silence_s=300.0)
COMPLETED = ProgramResult(Outcome.COMPLETED)
#: What a supervisor says that the cluster has told to end.
TOLD_TO_END = ProgramResult(Outcome.INTERRUPTED, reason="SIGTERM", signum=signal.SIGTERM)


class Node:
    def run(self) -> None: ...


class Scene:
    """A run of two nodes, on a machine, with their supervisor on another; and a clock.

    Attributes:
        told: All messages.
        done: What was to be done else, as `remove UID`, `end POD` or `delete`, `word REASON`.
        refusal: What the cluster answers who asks for the end; None: it does it.
    """

    def __init__(
        self, when: Any = "on_failure", limits: WaitLimits = LIMITS, *, is_launch: bool = True
    ) -> None:
        program = lp.Program("demo")
        with program.group("actor"):
            for _ in range(2):
                program.add_node(lp.PyClassNode(Node))
        plan = lp.plan(program, "local_mp", restart=RestartPolicy(when))
        self.now = 1000.0
        self.told: list[str] = []
        self.done: list[str] = []
        self.refusal: ApiError | None = None
        hands = Hands(
            tell=self.told.append,
            read_log=lambda one: self.done.append(f"read {one['metadata']['uid']}"),
            last_lines=lambda one: f"the last of {one['metadata']['uid']}",
            leave_word=lambda word: self.done.append(f"word {word}"),
            end=self._end,
            remove=lambda one: self.done.append(f"remove {one['metadata']['uid']}"),
        )
        self.state = RunState(plan, NAMES, hands, self.now, limits, is_launch=is_launch)
        self.supervisor = running(RUN, container="supervisor", uid="s")
        self.supervisor["spec"]["nodeName"] = SUPERVISOR_MACHINE
        self.first, self.second = running(FIRST, uid="1"), running(SECOND, uid="2")
        self.see(job(RUN, active=1))

    def _end(self, name: str | None, grace_s: int) -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.done.append(f"end {name}" if name is not None else "delete")
        return name is not None

    def begin(self, *, up: bool = True) -> "Scene":
        """Has all pods run, and the supervisor say so."""
        for each in (self.supervisor, self.first, self.second):
            self.see(each)
        if up:
            self.say(Up())
            self.say_status()
        return self

    def see(self, one: dict[str, Any], change: Any = "MODIFIED", **fields: Any) -> dict[str, Any]:
        """Takes in an object, with other metadata."""
        one = {**one, "metadata": {**one["metadata"], **fields}}
        self.state.see(change, one, self.now)
        return one

    def end(self, one: dict[str, Any], code: int, reason: str = "Error") -> None:
        status = {**one["status"], "phase": "Failed" if code else "Succeeded"}
        (container,) = status["containerStatuses"]
        status["containerStatuses"] = [{**container, "state": terminated(code, reason)}]
        self.see({**one, "status": status})

    def delete(self, one: dict[str, Any], grace_s: float = 10.0) -> None:
        self.see(one, deletionTimestamp="now", deletionGracePeriodSeconds=grace_s)

    def say(self, record: Any, uid: str = "s") -> None:
        self.state.hear(uid, record, self.now)

    def say_status(self, *awaited: str, states: tuple[str, str] = ("running", "running")) -> None:
        nodes = [
            NodeStatus(f"actor[{index}]", state, host, 12, {})
            for index, (state, host) in enumerate(zip(states, (FIRST, SECOND), strict=True))
        ]
        self.say(StatusRecord(tuple(nodes), awaited))

    def after(self, seconds: float) -> ProgramResult | None:
        """Returns how the program ended, if it does within so many seconds."""
        until = self.now + seconds
        result = self.state.look(self.now)
        while result is None and self.now < until:
            due = self.state.due
            assert due > self.now, "it looks all the time"
            self.now = min(until, due)
            result = self.state.look(self.now)
        return result

    def soon(self, seconds: float = TIMING.explain_s + TIMING.settle_s) -> ProgramResult:
        """Returns how the program ended, by default once that is settled."""
        result = self.after(seconds)
        assert result is not None
        return result

    def drain(self) -> list[str]:
        """Returns what was done since."""
        found, self.done[:] = self.done[:], []
        return found


def lost(host: str) -> ProgramResult:
    return ProgramResult(
        Outcome.FAILED, (NodeFailure("actor[1]", host, "its link broke", host_lost=True),)
    )


# The end, as the supervisor says it


def test_what_the_supervisor_says_of_the_end_counts_and_its_notes_are_told() -> None:
    scene = Scene().begin()
    scene.say(Note("something to know"))
    scene.say(ProgramEnd(ProgramResult(Outcome.FAILED)), uid="of another supervisor")
    assert scene.after(10.0) is None
    scene.say(ProgramEnd(COMPLETED))
    assert scene.soon() == COMPLETED
    assert scene.told == ["something to know"]


def test_what_the_cluster_knows_of_a_lost_pod_is_waited_for_a_moment() -> None:
    scene = Scene().begin()
    scene.say(ProgramEnd(lost(SECOND)))
    assert scene.after(TIMING.explain_s / 2) is None
    scene.end(scene.second, 137, "OOMKilled")
    assert "was killed: out of memory" in scene.soon().failures[0].summary
    scene = Scene().begin()
    scene.say(ProgramEnd(lost(SECOND)))
    (failure,) = scene.soon().failures
    assert failure.summary == "its link broke (its pod was on the machine machine-1)"


def test_an_end_that_the_cluster_wanted_is_none_before_it_is_known_that_none_follows() -> None:
    scene = Scene().begin()
    scene.say(ProgramEnd(TOLD_TO_END))
    assert scene.after(1000.0) is None
    again = running(RUN, container="supervisor", uid="s2", created="2026-01-01T00:00:09Z")
    scene.see(again)
    assert f"the program starts again, in {RUN}-abcde" in scene.told
    scene.say(ProgramEnd(COMPLETED), uid="s2")
    assert scene.soon() == COMPLETED


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        (("MODIFIED", condition("Failed", "True", "BackoffLimitExceeded")), "was evicted"),
        (("MODIFIED", condition("Failed", "True", "DeadlineExceeded")), "as long as max_run_s"),
        (("DELETED", condition("Failed", "False", "")), "the run was deleted"),
    ],
)
def test_who_has_told_a_supervisor_to_end_is_told(owner: Any, reason: str) -> None:
    scene = Scene("never").begin()
    scene.say(ProgramEnd(TOLD_TO_END))
    change, how = owner
    scene.see(job(RUN, how), change)
    # What is said of pods may come later.
    evicted = condition("DisruptionTarget", "True", "EvictionByEvictionAPI")
    scene.see({**scene.supervisor, "status": {"phase": "Failed", "conditions": [evicted]}})
    result = scene.soon()
    assert (result.outcome, result.signum) == (Outcome.INTERRUPTED, signal.SIGTERM)
    assert reason in result.reason


# The end, without a word


def test_a_supervisor_that_dies_without_a_word_is_named_with_what_it_printed_last() -> None:
    scene = Scene("never").begin()
    scene.say(PrintedRecord("supervisor", b"MemoryError: no more\n"))
    scene.state.note_log_over("s", scene.now)
    scene.see(job(RUN, condition("Failed", "True", "BackoffLimitExceeded")))
    scene.end(scene.supervisor, 137)  # later than what is said of its Job
    result = scene.soon()
    assert f"its supervisor's pod {RUN}-abcde was killed by SIGKILL" in result.reason
    assert "MemoryError: no more" in result.failures[0].last_output


def test_a_run_that_somebody_deletes_is_interrupted() -> None:
    scene = Scene("never").begin()
    scene.see(job(RUN), "DELETED")
    for one in (scene.supervisor, scene.first, scene.second):
        scene.see(one, "DELETED")
    scene.state.note_log_over("s", scene.now)
    result = scene.soon()
    assert (result.outcome, result.signum) == (Outcome.INTERRUPTED, signal.SIGTERM)
    assert "the run was deleted" in result.reason
    attached = Scene(is_launch=False)
    attached.state.sight.jobs.clear()  # it was deleted before
    attached.state.see("LISTED", {"kind": "Job"}, attached.now)
    assert "its supervisor never began: the run was deleted" in attached.soon().reason


def test_a_detached_run_whose_supervisor_is_gone_has_ended_nodes() -> None:
    scene = Scene(is_launch=False)
    scene.see(job(RUN, condition("Failed", "True", "BackoffLimitExceeded"), failed=1))
    assert scene.soon().reason == "its supervisor's pod is gone; it left no result"
    assert {each.state for each in scene.state.nodes} == {"ended"}


# Until all nodes are placed


def test_what_pods_wait_for_is_told_once_and_is_the_reason_when_they_waited_too_long() -> None:
    scene = Scene()
    for host in (FIRST, SECOND):
        scene.see(pod(host, conditions=(UNSCHEDULABLE,)))
    assert scene.after(599.0) is None
    assert scene.told == ["actor[0], actor[1] wait: Unschedulable: 2 Insufficient gpu."]
    assert [each.waits_for for each in scene.state.nodes] == [
        "Unschedulable: 2 Insufficient gpu."
    ] * 2
    result = scene.soon(2.0)
    assert "not all nodes were placed within 600 s: actor[0], actor[1] wait:" in result.reason


def test_a_launch_waits_for_its_turn_in_a_queue_however_long_that_takes() -> None:
    scene = Scene()
    scene.see(QUEUED)
    scene.after(1.0)
    for _ in range(100):
        assert scene.after(100.0) is None
        scene.see(QUEUED)
    assert scene.told == ["actor wait: its turn in the queue 'team'"] or scene.told == [
        "actor[0], actor[1] wait: its turn in the queue 'team'"
    ]


@pytest.mark.parametrize(
    ("code", "told"), [(3, "ended with exit code 3"), (75, "lost the link to the supervisor")]
)
def test_pods_that_end_before_all_are_placed_end_the_launch(code: int, told: str) -> None:
    scene = Scene().begin(up=False)
    scene.end(scene.second, code)
    scene.see(job(failed=1, failedIndexes="1"))
    assert scene.after(TIMING.explain_s) is None  # the supervisor may explain it
    result = scene.soon(2.0)
    assert f"cannot start: actor[1]: its pod {told}" in result.reason
    assert result.failures[0].last_output == "the last of 2"


def test_all_pods_may_run_though_the_supervisor_does_not_hear_of_them() -> None:
    result = Scene().begin(up=False).after(601.0)
    assert result is not None
    assert "all pods run, but not all have reached the supervisor" in result.reason


# Stops


def test_a_stop_lets_the_supervisor_end_all_in_order_and_says_whom_it_waits_for() -> None:
    scene = Scene().begin()
    scene.drain()
    scene.state.ask(StopAsked("SIGINT", signal.SIGINT), scene.now)
    assert scene.after(5.0) is None
    assert scene.drain() == [f"end {RUN}-abcde"]
    assert scene.told == [
        "stopping 'demo' (SIGINT); a second Ctrl-C ends it at once",
        "waiting for actor[0], actor[1] (59 s at most)",
    ]
    scene.say(ProgramEnd(TOLD_TO_END))
    result = scene.soon()
    assert (result.outcome, result.reason) == (Outcome.INTERRUPTED, "SIGINT")


def test_a_program_that_is_ended_because_its_work_is_done_has_completed() -> None:
    scene = Scene().begin()
    scene.state.ask(StopAsked(WORK_DONE), scene.now)
    scene.after(0.0)
    scene.say(ProgramEnd(TOLD_TO_END))
    assert scene.soon().outcome is Outcome.COMPLETED


def test_a_supervisor_that_does_not_stop_within_its_notice_is_removed_by_force() -> None:
    scene = Scene().begin()
    scene.state.ask(StopAsked("enough"), scene.now)
    assert scene.after(60.0 + TIMING.spare_s + TIMING.gone_s - 1.0) is None
    assert not scene.state.is_in_hurry
    assert scene.soon(2.0).reason == "enough; it did not end within its notice"
    assert scene.state.is_in_hurry


def test_nodes_that_end_when_they_like_are_waited_for_without_end() -> None:
    scene = Scene(limits=dataclasses.replace(LIMITS, notice_s=-1.0)).begin()
    scene.state.ask(StopAsked("enough"), scene.now)
    assert scene.after(10_000.0) is None


def test_a_kill_deletes_all_at_once_also_after_a_stop() -> None:
    scene = Scene().begin()
    scene.state.ask(StopAsked("enough"), scene.now)
    scene.after(0.0)
    scene.drain()
    scene.state.ask(KillAsked(), scene.now)
    result = scene.soon(0.0)
    assert (result.outcome, result.reason) == (Outcome.STOPPED, "enough")
    assert scene.drain() == ["delete"]
    assert scene.state.is_in_hurry


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_stop_before_all_nodes_are_placed_deletes_all(has_begun: bool) -> None:
    scene = Scene()
    if has_begun:
        scene.begin(up=False)
    scene.drain()
    scene.state.ask(StopAsked("enough"), scene.now)
    assert scene.soon(0.0).outcome is Outcome.STOPPED
    assert scene.drain() == ["delete"]


def test_a_cluster_that_does_not_answer_is_asked_again_and_again() -> None:
    scene = Scene().begin()
    scene.refusal = refused(is_final=False)
    scene.state.ask(StopAsked("enough"), scene.now)
    assert scene.after(TIMING.ask_again_s + 1.0) is None
    assert scene.told.count("the program cannot be stopped yet: it has just begun") == 2
    scene.refusal = None
    scene.after(TIMING.ask_again_s)
    assert scene.drain()[-1] == f"end {RUN}-abcde"


def test_a_kill_waits_for_a_cluster_that_does_not_answer_for_a_while_only() -> None:
    scene = Scene().begin()
    scene.refusal = refused(None, is_final=False)
    scene.state.ask(KillAsked(), scene.now)
    assert scene.after(TIMING.gone_s - 1.0) is None
    assert scene.soon(2.0).reason == "kill() was called; the cluster does not answer"


def test_who_may_not_stop_a_program_is_told_so() -> None:
    scene = Scene().begin()
    scene.refusal = refused()
    scene.state.ask(StopAsked("enough"), scene.now)
    with pytest.raises(ApiError, match="we may not"):
        scene.after(0.0)


# Other shells


def test_another_shell_leaves_word_and_the_launching_process_ends_well() -> None:
    other = Scene(is_launch=False).begin()
    other.drain()
    other.state.ask(StopAsked("`stop` in another shell"), other.now)
    other.after(0.0)
    assert other.drain() == ["word `stop` in another shell", f"end {RUN}-abcde"]
    scene = Scene().begin()
    scene.see(job(RUN), annotations={"launchpad-lite/stop": "somebody"})
    scene.say(ProgramEnd(TOLD_TO_END))
    scene.see(job(RUN), "DELETED")
    result = scene.soon()
    assert (result.outcome, result.reason, result.signum) == (Outcome.STOPPED, "somebody", None)
    early = Scene()
    early.see(job(RUN), annotations={"launchpad-lite/stop": "somebody"})
    early.see(job(RUN), "DELETED")
    assert early.soon().outcome is Outcome.STOPPED


def test_a_stop_from_elsewhere_deletes_what_only_waits_for_an_image() -> None:
    other = Scene(is_launch=False)
    other.see(pod(FIRST, state=waiting("ErrImagePull")))
    other.see(other.supervisor)
    other.drain()
    other.state.ask(StopAsked("enough"), other.now)
    # Its log tells whether all nodes were placed, once it is read.
    assert other.after(1.0) is None
    assert other.drain() == ["word enough"]
    other.state.note_caught_up("s", other.now)
    other.soon(0.0)
    assert other.drain() == ["delete"]
    without = Scene(is_launch=False)
    without.see(pod(RUN, container="supervisor", state=waiting("ErrImagePull"), uid="s"))
    without.state.see("LISTED", {"kind": "Pod"}, without.now)
    without.state.ask(StopAsked("enough"), without.now)
    without.after(0.0)
    assert without.drain()[-1] == "delete"


def test_a_log_that_is_not_read_in_time_does_not_hold_up_a_stop() -> None:
    other = Scene(is_launch=False).begin(up=False)
    other.state.ask(StopAsked("enough"), other.now)
    other.after(TIMING.first_status_s)
    assert other.drain()[-1] == f"end {RUN}-abcde"


def test_a_shell_that_attaches_removes_no_pod_and_knows_when_the_program_is_lost() -> None:
    other = Scene("never", is_launch=False).begin()
    other.delete(other.first)
    other.delete(other.supervisor)
    result = other.soon(100.0)
    assert f"the machine {SUPERVISOR_MACHINE} of its supervisor does not answer" in result.reason
    assert not [each for each in other.done if each.startswith("remove")]


# Machines that do not answer


@pytest.fixture
def scene() -> Scene:
    found = Scene().begin()
    found.drain()
    return found


def test_that_the_machine_of_a_supervisor_is_away_is_told_with_what_follows(scene: Scene) -> None:
    scene.see(event(f"{RUN}-abcde", "NodeNotReady", "Node is not ready"))
    scene.after(1.0)
    away, follows = scene.told
    assert away == f"supervisor: the cluster gets no signal from the machine {SUPERVISOR_MACHINE}"
    assert "after 300 s the supervisor stops it" in follows


def test_pods_that_leave_as_they_are_told_are_no_matter(scene: Scene) -> None:
    scene.delete(scene.first)
    scene.delete(scene.second)
    scene.end(scene.first, 75)
    scene.see(scene.second, "DELETED")
    assert scene.after(1000.0) is None
    assert not scene.done
    assert not [each for each in scene.told if "does not answer" in each]


def test_a_node_that_works_is_waited_for_without_end_and_told_once(scene: Scene) -> None:
    scene.delete(scene.first, grace_s=600.0)
    scene.after(600.0)
    assert not scene.told
    scene.after(10_000.0)
    name = scene.first["metadata"]["name"]
    (told,) = scene.told
    assert told.startswith(f"machine machine-1 does not answer; pod {name} is replaced when it is")
    assert not scene.done


@pytest.mark.parametrize("grace_s", [10.0, 30 * 24 * 3600.0])
def test_a_pod_is_removed_once_its_supervisor_has_awaited_another_for_long(
    scene: Scene, grace_s: float
) -> None:
    scene.delete(scene.first, grace_s)
    scene.say_status(FIRST)
    scene.after(1.0)
    scene.say_status(FIRST)  # each time
    scene.after(LIMITS.silence_s + TIMING.stuck_s - 2.0)
    assert not scene.done
    scene.after(2.0)
    assert scene.drain() == ["remove 1"]
    scene.after(TIMING.stuck_s + 1.0)
    assert scene.drain() == ["remove 1"], "it could not be removed, and is tried again"
    scene.see(scene.first, "DELETED")
    scene.after(1000.0)
    assert not scene.done


def test_a_pod_that_is_awaited_no_more_is_at_work(scene: Scene) -> None:
    scene.delete(scene.first)
    scene.say_status(FIRST)
    scene.after(LIMITS.silence_s)
    scene.say_status()
    scene.after(1000.0)
    assert not scene.done


def test_a_pod_that_has_called_by_the_time_that_all_are_placed_is_at_work() -> None:
    scene = Scene().begin(up=False)
    scene.say_status(FIRST, SECOND, states=("starting", "starting"))  # as a supervisor begins
    scene.after(LIMITS.silence_s + TIMING.stuck_s)
    scene.say(Up())
    scene.drain()
    scene.delete(scene.first)
    scene.after(1000.0)
    assert not scene.done


def test_a_node_that_does_not_come_back_gets_no_other_pod() -> None:
    scene = Scene("never").begin()
    scene.drain()
    scene.delete(scene.first)
    scene.say_status(FIRST)
    scene.after(1000.0)
    assert not scene.done
    assert scene.told[-1].endswith("ends when it is back")


def test_what_a_supervisor_said_counts_no_more_when_it_is_to_leave_itself(scene: Scene) -> None:
    scene.delete(scene.supervisor)
    scene.delete(scene.first)
    scene.say_status(FIRST)
    scene.after(LIMITS.launcher_silence_s)
    assert not scene.done


def test_a_supervisor_is_gone_when_it_must_have_missed_its_launcher(scene: Scene) -> None:
    scene.delete(scene.supervisor)
    scene.after(LIMITS.launcher_silence_s + LIMITS.notice_s)
    assert not scene.done
    scene.after(TIMING.spare_s + TIMING.stuck_s)
    assert scene.drain() == ["remove s"]


def test_a_supervisor_whose_nodes_end_when_they_like_may_run_for_ever() -> None:
    scene = Scene(limits=dataclasses.replace(LIMITS, notice_s=-1.0)).begin()
    scene.drain()
    scene.delete(scene.supervisor)
    scene.after(10_000.0)
    assert not scene.done


def test_a_supervisor_that_places_nodes_does_not_look_for_its_launcher_yet() -> None:
    scene = Scene(limits=dataclasses.replace(LIMITS, schedule_s=10_000.0)).begin(up=False)
    scene.drain()
    scene.delete(scene.supervisor)
    scene.after(9_000.0)
    assert not scene.done


def test_pods_beside_a_supervisor_that_was_cut_off_are_awaited_by_the_next(scene: Scene) -> None:
    scene.delete(scene.supervisor)
    scene.delete(scene.first)
    scene.after(LIMITS.launcher_silence_s + LIMITS.notice_s + TIMING.spare_s + TIMING.stuck_s)
    assert scene.drain() == ["remove s"]
    scene.see(scene.supervisor, "DELETED")
    scene.see(running(RUN, container="supervisor", uid="s2", created="2026-01-01T00:00:09Z"))
    scene.drain()
    scene.say(StatusRecord((), (FIRST, SECOND)), uid="s2")
    scene.after(LIMITS.silence_s + TIMING.stuck_s - 1.0)
    assert not scene.done
    scene.after(2.0)
    assert scene.drain() == ["remove 1"]


def test_a_program_that_may_not_begin_anew_ends_with_its_supervisor() -> None:
    scene = Scene("never").begin()
    scene.delete(scene.supervisor, grace_s=70.0)
    assert scene.after(70.0 + TIMING.stuck_s - 1.0) is None
    result = scene.soon(2.0)
    assert result.outcome is Outcome.FAILED
    assert scene.told[-1] == result.reason


def test_a_program_whose_supervisor_has_ended_its_nodes_does_not_begin_anew(scene: Scene) -> None:
    scene.delete(scene.supervisor)
    for each in (scene.first, scene.second):
        scene.end(each, 0)
    assert "how the program ended is not known" in scene.soon(100.0).reason


def test_machines_that_do_not_end_pods_in_time_are_silent(scene: Scene) -> None:
    scene.delete(scene.first)
    assert scene.state.silent_machines(scene.now) == set()
    scene.after(11.0)
    assert scene.state.silent_machines(scene.now) == {"machine-1"}
    scene.end(scene.first, 75)
    assert scene.state.silent_machines(scene.now) == set()


def test_nothing_happens_while_nothing_is_due() -> None:
    scene = Scene(limits=WaitLimits(notice_s=1.0)).begin()
    scene.after(TIMING.gather_s)
    assert scene.state.due == math.inf
