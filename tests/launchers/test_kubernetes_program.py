"""A run as its launching process sees it, and other shells that attach to it."""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import format_stack
from typing import Any

import pytest

from courier import ExceptionReport, RemoteError
from launchpad_lite.errors import LaunchError, NodeFailedError
from launchpad_lite.launching import NodeFailure, Outcome, ProgramResult, RunningProgram
from launchpad_lite.testing import poll_until

pytest.importorskip("kubernetes.client")
pytest.importorskip("kubernetes_validate")

from tests.beds.kubernetes.server import Failure
from tests.beds.kubernetes.store import ApiError, Object
from tests.launchers.pretended_cluster import (
    ANOTHER_KEY,
    ANOTHER_MACHINE,
    KEY,
    MACHINE,
    NAMESPACE,
    RIGHTS,
    TOKEN,
    TOLD_TO_END,
    Lab,
    LateApi,
    PretendedCluster,
    SlowApi,
    Supervisor,
)

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
COMPLETED = ProgramResult(Outcome.COMPLETED)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    found = PretendedCluster(folder)
    monkeypatch.setenv("KUBECONFIG", str(found.write_config()))
    yield found
    found.close()


@pytest.fixture
def lab(cluster: PretendedCluster, tmp_path: Path) -> Iterator[Lab]:
    """Each test fails that leaves objects, threads or connections to the server behind."""
    found = Lab(cluster, tmp_path)
    yield found
    cluster.heal()
    cluster.api.tokens[TOKEN] = RIGHTS
    cluster.answers, cluster.is_lost = True, False
    cluster.lost.clear()
    found.end_all()
    assert poll_until(lambda: not cluster.left(), must=False), cluster.left()
    assert poll_until(lambda: not cluster.users(), must=False), cluster.users()


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[str], int]:
    """Counts how often something was told so far."""
    said = ""

    def count(text: str) -> int:
        nonlocal said
        said += capsys.readouterr().err
        return said.count(text)

    return count


Told = Callable[[str], int]


def uids(cluster: PretendedCluster) -> Sequence[str]:
    return [pod["metadata"]["uid"] for pod in cluster.pods()]


def are_being_deleted(cluster: PretendedCluster) -> bool:
    return any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods())


def failed(node: str, host: str = "") -> ProgramResult:
    failure = NodeFailure(node, host, "its link broke", host_lost=bool(host))
    return ProgramResult(Outcome.FAILED, (failure,))


def reason_of(program: RunningProgram) -> str:
    assert program.result is not None
    return program.result.reason


def is_terminated(program: RunningProgram) -> bool:
    """Tells whether a program ends as if this process had got SIGTERM."""
    with pytest.raises(SystemExit) as ended:
        program.wait(60)
    return ended.value.code == 128 + signal.SIGTERM


# A life


@pytest.mark.parametrize("jobset", [False, True])
def test_output_notes_and_the_end_arrive_through_connections_that_break(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str], jobset: bool
) -> None:
    program, supervisor = lab.run(jobset=jobset)
    assert any(kind == "jobsets" for kind, _ in cluster.store.all()) == jobset
    supervisor.say(lambda records: records.show("actor[0]", b"hello\nwor"))
    poll_until(lambda: {each.state for each in program.status()} == {"running"})
    cluster.drop()
    supervisor.say(lambda records: records.show("actor[0]", b"ld\n"))
    log = lab.log_dir / "actor" / "1.log"
    for number in range(6):
        line = b"%d\n" % number
        supervisor.say(lambda records, line=line: records.show("actor[1]", line))
        poll_until(lambda line=line: log.read_bytes().endswith(line))
        cluster.drop()
    supervisor.say(lambda records: records.note("something to know"))
    supervisor.end(COMPLETED)
    assert program.wait(60).outcome is Outcome.COMPLETED
    assert cluster.left() == []
    lines = [("actor[1]", b"%d\n" % number) for number in range(6)]
    assert list(program.output()) == [
        ("actor[0]", b"hello\n"),
        ("actor[0]", b"world\n"),
        *lines,
    ]
    shown = capsys.readouterr()
    assert "[actor[0]] hello" in shown.out
    assert "[actor[0]] world" in shown.out
    numbers = re.findall(r"^\[actor\[1\]\] (\d+)$", shown.out, re.MULTILINE)
    assert numbers == log.read_text().split() == [str(number) for number in range(6)]
    assert "launchpad: something to know" in shown.err


def test_no_thread_waits_for_a_server_that_fails_while_the_program_ends(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    poll_until(lambda: cluster.beat(supervisor))
    # All but what removes the program.
    cluster.fail(503, lambda method, path: method == "GET" and "watch=true" in path)
    (failure,) = cluster.api.faults.failures
    poll_until(lambda: failure.left <= (1 << 30) - 3)
    program.kill()
    assert program.join(20)
    assert poll_until(lambda: not cluster.users(), 10.0)


def test_a_folder_for_logs_that_cannot_be_written_is_told_before_anything_is_watched(
    lab: Lab, tmp_path: Path
) -> None:
    lab.log_dir = tmp_path / "file"
    lab.log_dir.write_text("")
    with pytest.raises(LaunchError, match=r"cannot write logs: .*file.*log_dir="):
        lab.launch()


# Stopping


def test_stop_lets_the_supervisor_end_all_in_order(lab: Lab, cluster: PretendedCluster) -> None:
    program, supervisor = lab.run()
    poll_until(lambda: cluster.beat(supervisor))
    result = program.stop(60)
    assert result.outcome is Outcome.STOPPED
    assert result.reason == "stop() was called"
    assert cluster.left() == []


def test_ctrl_c_ends_a_program_in_order_and_a_second_one_does_not_wait_for_the_notice(
    lab: Lab, cluster: PretendedCluster
) -> None:
    cluster.answers = False
    program, supervisor = lab.run(notice_s=60.0)
    program.handle_signal(signal.SIGINT)
    name = supervisor.pod["metadata"]["name"]
    poll_until(
        lambda: "deletionTimestamp" in cluster.store.get("pods", NAMESPACE, name)["metadata"]
    )
    program.handle_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        program.wait(60)
    assert cluster.left() == []


def test_a_signal_handler_may_stop_a_program(lab: Lab) -> None:
    program, _ = lab.run()
    before = signal.signal(
        signal.SIGUSR1, lambda number, _: program.request_stop("a signal of ours", number)
    )
    try:
        for _ in range(100):  # also while one is being handled
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(SystemExit) as ended:
            program.wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert reason_of(program) == "a signal of ours"


def test_a_supervisor_that_does_not_stop_within_the_notice_is_removed_by_force(
    lab: Lab, cluster: PretendedCluster
) -> None:
    cluster.answers = False
    program, _ = lab.run(notice_s=600.0)
    program.request_stop("enough")
    poll_until(lambda: are_being_deleted(cluster))
    lab.clock.wait_for_looks(program)
    lab.clock.advance(605.0)
    assert not program.join(0.2)
    lab.clock.advance(35.0)  # what is spared beside the notice, and what is waited besides
    assert program.wait(60).reason == "enough; it did not end within its notice"
    assert cluster.left() == []


def test_a_supervisor_that_is_gone_before_it_is_told_to_stop_is_not_waited_for(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run(moves=True, notice_s=60.0)
    cluster.fail(503, lambda method, path: method == "GET" and "watch" in path)
    cluster.places = False
    cluster.end(supervisor.pod, 137)
    cluster.store.delete("pods", NAMESPACE, supervisor.pod["metadata"]["name"], grace_s=0)
    poll_until(lambda: supervisor.pod["metadata"]["uid"] not in uids(cluster))
    assert program.stop(60).outcome is Outcome.STOPPED
    assert cluster.left() == []


def test_who_kills_waits_no_longer_for_a_cluster_that_does_not_answer(
    lab: Lab, cluster: PretendedCluster, told: Told
) -> None:
    # The thread that decides asks once, so that it hears of the kill.
    lab.wait_for(request_pause_s=30.0, longest_request_pause_s=30.0, patience_s=0.0)
    program, supervisor = lab.run()
    poll_until(lambda: cluster.beat(supervisor))
    cluster.api.faults.failures.append(
        Failure(503, 1 << 30, lambda method, path: method == "DELETE" or path.startswith(PODS), 0)
    )
    program.request_stop("enough")
    poll_until(lambda: told("the program cannot be stopped yet"))
    assert program.result is None
    program.kill()
    while not program.join(0.1):
        lab.clock.advance(30.0)
    reason = reason_of(program)
    assert "enough; the cluster does not answer" in reason
    assert "whether anything is left of it is not known" in reason
    # All that the Role of the documentation allows.
    assert "kubectl get pods,jobs -n team -l launchpad-lite/run=" in reason
    cluster.heal()
    cluster.store.delete("jobs", NAMESPACE, program.names.run)


# Until all nodes are placed


def test_what_pods_wait_for_is_told_and_the_reason_when_they_waited_too_long(
    lab: Lab, cluster: PretendedCluster, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.places = False
    program = lab.launch(schedule_s=600.0)
    poll_until(lambda: len(cluster.pods()) == 3)
    for pod in cluster.pods():
        cluster.condition(
            pod,
            type="PodScheduled",
            status="False",
            reason="Unschedulable",
            message="0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        )
    said = ""

    def waiting() -> list[str]:
        nonlocal said
        said += capsys.readouterr().err
        # In one line if they were seen at the same time.
        pattern = r"^launchpad: (.+) waits?: .*Insufficient nvidia.com/gpu"
        return sorted(", ".join(re.findall(pattern, said, re.MULTILINE)).split(", "))

    poll_until(lambda: waiting() == ["actor[0]", "actor[1]", "supervisor"])
    assert program.result is None
    lab.clock.advance(600.0)
    with pytest.raises(LaunchError) as caught:
        program.await_up()
    assert "not all nodes were placed within 600 s" in str(caught.value)
    assert "Insufficient nvidia.com/gpu" in str(caught.value)
    assert cluster.left() == []


def test_a_quota_is_told_and_ends_the_launch(
    lab: Lab, cluster: PretendedCluster, told: Told
) -> None:
    cluster.api.quota = lambda _: "exceeded quota: few"
    program = lab.launch(schedule_s=600.0)
    poll_until(lambda: told("exceeded quota: few"))
    lab.clock.advance(600.0)
    with pytest.raises(LaunchError, match=r"within 600 s: (.|\n)*FailedCreate: .*exceeded quota"):
        program.await_up()
    assert cluster.left() == []


def test_a_node_that_cannot_start_ends_the_launch_with_what_it_printed(
    lab: Lab, cluster: PretendedCluster
) -> None:
    lab.wait_for(explain_s=0.3)
    program = lab.launch()
    pod = cluster.pod(program.names.host("actor", 1))
    cluster.print(pod, b"SyntaxError: this Python is old")
    cluster.end(pod, 1)
    with pytest.raises(LaunchError, match=r"(?s)actor\[1\]: its pod.*SyntaxError: this Python"):
        program.await_up()
    assert cluster.left() == []


def test_a_launch_whose_nodes_have_lost_their_supervisor_says_where_that_is(
    lab: Lab, cluster: PretendedCluster
) -> None:
    lab.wait_for(explain_s=0.3)
    program = lab.launch()
    supervisor = cluster.supervisor().pod["metadata"]["name"]
    cluster.end_together([program.names.host("actor", replica) for replica in (0, 1)], 75)
    where = (
        f"lost the link to the supervisor; its pod {supervisor} is on the machine {ANOTHER_MACHINE}"
    )
    with pytest.raises(LaunchError, match=rf"cannot start: actor\[\d\].* {where}"):
        program.await_up()
    assert cluster.left() == []


def test_a_launch_whose_failed_pods_are_gone_by_then_says_what_is_missing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lab.launch()
    monkeypatch.setattr(program._sight, "failed", dict)
    assert "not all nodes were placed within 30 s" in program._early()


@pytest.mark.parametrize("is_by_another_shell", [False, True])
def test_a_stop_before_all_nodes_are_placed_ends_the_launch(
    lab: Lab, cluster: PretendedCluster, is_by_another_shell: bool
) -> None:
    cluster.places = False
    program = lab.launch()
    if is_by_another_shell:
        assert lab.attach(program).stop(60).outcome is Outcome.STOPPED
    else:
        program.request_stop("somebody wants the end")
    expected = "the run was deleted" if is_by_another_shell else "somebody wants the end"
    with pytest.raises(LaunchError, match=expected):
        program.await_up()
    assert cluster.left() == []


def test_pods_of_a_launch_that_is_given_up_are_not_waited_for_as_long_as_their_notice(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program = lab.launch(notice_s=600.0)
    cluster.pod(program.names.host("actor", 1))
    cluster.is_lost = True  # they do not hear it
    program.request_stop("somebody wants the end")

    def notices_s() -> list[int]:
        return [pod["metadata"].get("deletionGracePeriodSeconds", 600) for pod in cluster.pods()]

    poll_until(lambda: max(notices_s()) == 1)
    cluster.is_lost = False
    with pytest.raises(LaunchError, match="somebody wants the end"):
        program.await_up()
    assert cluster.left() == []


def press_ctrl_c_in(*places: str) -> None:
    """Interrupts the main thread, once it is in all of these."""
    me = threading.main_thread().ident
    assert me is not None

    def is_there() -> bool:
        stack = "".join(format_stack(sys._current_frames()[me]))
        return all(place in stack for place in places)

    poll_until(is_there)
    signal.pthread_kill(me, signal.SIGINT)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_during_a_launch_returns_only_when_nothing_is_left_of_it(
    lab: Lab, cluster: PretendedCluster, presses: int
) -> None:
    program = lab.launch(notice_s=600.0)
    cluster.pod(program.names.host("actor", 1))
    cluster.is_lost = True  # so that all must be removed by force

    def end() -> None:
        press_ctrl_c_in("in await_up", "in wait")
        poll_until(lambda: are_being_deleted(cluster))
        if presses == 2:
            press_ctrl_c_in("in _join_through_interrupts", "in wait")
        else:
            while not program.join(0.05):
                lab.clock.advance(700.0)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        program.await_up()
    thread.join()
    assert program.result is not None
    assert cluster.left() == []


def test_a_launch_waits_for_its_turn_in_a_queue_however_long_that_takes(
    lab: Lab, told: Told
) -> None:
    program = lab.launch(queue="research", schedule_s=30.0)
    poll_until(lambda: told("wait: its turn in the queue 'research'"))
    lab.clock.advance(1000.0)
    assert not program.join(0.3)


# Other shells


@pytest.mark.parametrize("moves", [False, True])
def test_another_shell_that_stops_a_program_ends_it_for_its_launcher_as_well(
    lab: Lab, cluster: PretendedCluster, told: Told, moves: bool
) -> None:
    program, _ = lab.run(moves=moves)
    other = lab.attach(program)
    assert [each.state for each in other.status()] == ["running"] * 2
    assert other.stop(60).outcome is Outcome.STOPPED
    assert program.wait(60).outcome is Outcome.STOPPED
    who = f"stop() was called in process {os.getpid()} on {socket.gethostname()}"
    assert reason_of(program) == who
    assert told(f"the program was ended: {who}") == 1
    assert cluster.left() == []


def test_another_shell_that_kills_a_program_ends_it_for_its_launcher_as_well(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, _ = lab.run()
    lab.attach(program).kill()
    assert program.wait(60).outcome is Outcome.STOPPED
    assert "kill() was called in process" in reason_of(program)
    poll_until(lambda: not cluster.left())


def test_status_tells_of_pods_as_long_as_the_supervisor_says_nothing(
    lab: Lab, cluster: PretendedCluster
) -> None:
    lab.wait_for(first_status_s=0.1)
    cluster.places = False
    program = lab.launch()
    other = lab.attach(program)
    for each in (program, other):
        poll_until(lambda each=each: {node.state for node in each.status()} == {"pending"})
    cluster.places = True
    for each in (program, other):
        poll_until(lambda each=each: {node.state for node in each.status()} == {"starting"})
    assert [node.host for node in other.status()] == [
        program.names.host("actor", replica) for replica in (0, 1)
    ]


@contextlib.contextmanager
def far_away(cluster: PretendedCluster) -> Iterator[None]:
    """Each request takes a while."""
    answer = cluster.api.faults.answer

    def answer_late(method: str, path: str) -> ApiError | None:
        time.sleep(0.05)
        return answer(method, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.api.faults, "answer", answer_late)
        yield


@pytest.mark.parametrize("end", [None, "", "lost"], ids=["runs", "failed", "unexplained"])
def test_the_status_in_another_shell_is_the_newest_one_and_knows_the_end(
    lab: Lab, cluster: PretendedCluster, end: str | None
) -> None:
    lab.wait_for(explain_s=0.3)
    lab.api = SlowApi
    program = lab.detach()
    supervisor = cluster.supervisor()
    supervisor.tell(program, actor_0="starting", actor_1="starting")
    supervisor.say(lambda records: records.show("actor[0]", b"hello\n" * 30))
    supervisor.tell(program, actor_1="serving")
    if end is not None:
        supervisor.end(failed("actor[0]", host=end))
        cluster.end(supervisor.pod, 1)
    with far_away(cluster):
        other = lab.attach(program)
        states = [each.state for each in other.status()]
        result = other.result
    assert states == ["running", "serving"]
    assert (result and result.outcome) == (None if end is None else Outcome.FAILED)
    lab.attach(program).stop(60)  # it is removed


def test_a_log_that_cannot_be_read_yet_is_no_status(lab: Lab, cluster: PretendedCluster) -> None:
    program = lab.detach()
    supervisor = cluster.supervisor()
    supervisor.tell(program)
    cluster.reads_logs = False
    other = lab.attach(program)
    poll_until(lambda: cluster.excuses >= 2)
    threading.Timer(0.2, setattr, (cluster, "reads_logs", True)).start()
    assert [each.state for each in other.status()] == ["running"] * 2


def test_another_shell_reads_what_all_supervisors_of_a_run_printed(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, first = lab.run(moves=True)
    first.say(lambda records: records.show("actor[0]", b"before\n"))
    cluster.store.delete("pods", NAMESPACE, first.pod["metadata"]["name"], grace_s=0)
    second = cluster.supervisor(2)
    second.say(lambda records: records.show("actor[1]", b"after\nunfinished"))
    second.say(lambda records: records.note("started again"))
    poll_until((lab.log_dir / "actor" / "1.log").read_bytes)
    poll_until(lambda: first.pod["metadata"]["uid"] not in uids(cluster))
    other = lab.attach(program)
    assert list(other.output()) == [("actor[1]", b"after\n"), ("supervisor", b"started again\n")]


def test_what_a_kubelet_says_instead_of_a_log_is_nobodys_output(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.reads_logs = False
    program = lab.launch()
    supervisor = cluster.supervisor()
    poll_until(lambda: cluster.excuses >= 2)
    cluster.reads_logs = True
    supervisor.place(program)
    program.await_up()
    cluster.end(supervisor.pod, 1)
    with pytest.raises(NodeFailedError) as caught:
        program.wait(60)
    assert "unable to retrieve" not in capsys.readouterr().out
    assert "unable to retrieve" not in str(caught.value)


def test_a_launch_that_leaves_at_once_holds_nothing(lab: Lab, cluster: PretendedCluster) -> None:
    program = lab.detach()
    program.kill()
    assert program.wait(1).outcome is Outcome.COMPLETED
    poll_until(lambda: not cluster.users())
    assert lab.attach(program).stop(60).outcome is Outcome.STOPPED


# How it ends otherwise


def test_what_the_cluster_knows_of_a_lost_pod_is_part_of_the_failure(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    host = program.names.host("actor", 1)
    pod = cluster.pod(host)
    supervisor.end(failed("actor[1]", host), **{"actor[0]": "its threads"})
    cluster.end(pod, 137, reason="OOMKilled")
    with pytest.raises(NodeFailedError, match=f"its pod {host} was killed: out of memory"):
        program.wait(60)
    assert program.crash_dir == lab.log_dir
    assert (lab.log_dir / "stacks" / "actor[0].txt").read_text() == "its threads"
    assert cluster.left() == []


def test_a_supervisor_that_dies_without_a_word_is_named_with_what_it_printed_last(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    cluster.print(supervisor.pod, b"MemoryError: no more")
    cluster.end(supervisor.pod, 137)
    with pytest.raises(NodeFailedError) as caught:
        program.wait(60)
    name = supervisor.pod["metadata"]["name"]
    assert f"its supervisor's pod {name} was killed by SIGKILL" in str(caught.value)
    assert "MemoryError: no more" in str(caught.value)
    assert cluster.left() == []


@pytest.fixture
def late_pods(lab: Lab) -> Iterator[threading.Event]:
    """While set, what is said of pods comes later than what is said of Jobs, and than logs."""
    lab.api = LateApi
    yield LateApi.late
    LateApi.late.clear()


def test_how_a_supervisor_died_is_known_though_its_watch_is_late(
    lab: Lab, cluster: PretendedCluster, late_pods: threading.Event
) -> None:
    program, supervisor = lab.run()
    late_pods.set()
    cluster.end(supervisor.pod, 137)
    with pytest.raises(NodeFailedError, match="was killed by SIGKILL"):
        program.wait(60)


def test_who_was_evicted_is_known_though_its_watch_is_late(
    lab: Lab, cluster: PretendedCluster, late_pods: threading.Event
) -> None:
    program, supervisor = lab.run()
    pod = cluster.pod(program.names.host("actor", 1))
    late_pods.set()
    cluster.condition(pod, type="DisruptionTarget", status="True", reason="EvictionByEvictionAPI")
    cluster.end(pod, 75)
    end = ProgramResult(Outcome.INTERRUPTED, reason="SIGTERM to actor[1]", signum=signal.SIGTERM)
    supervisor.end(end)
    cluster.end(supervisor.pod, 1)
    assert is_terminated(program)
    assert "evicted" in reason_of(program)


def test_another_shell_knows_the_end_where_jobs_are_seen_before_pods(
    lab: Lab, cluster: PretendedCluster, late_pods: threading.Event
) -> None:
    program = lab.detach()
    supervisor = cluster.supervisor()
    supervisor.end(COMPLETED)
    cluster.end(supervisor.pod, 0)
    jobs = ("jobs", NAMESPACE, program.names.supervisor_job)
    poll_until(lambda: cluster.store.get(*jobs)["status"].get("completionTime"))
    late_pods.set()
    assert lab.attach(program).wait(60).outcome is Outcome.COMPLETED
    lab.attach(program).stop(60)  # it is removed


def test_a_program_that_begins_anew_is_followed(
    lab: Lab, cluster: PretendedCluster, told: Told
) -> None:
    lab.wait_for(beat_s=0.05)
    program, first = lab.run(moves=True)
    cluster.store.delete("pods", NAMESPACE, first.pod["metadata"]["name"], grace_s=10)
    second = cluster.supervisor(2)
    second.place(program)
    poll_until(lambda: cluster.beat(second))
    second.end(COMPLETED)
    assert program.wait(60).outcome is Outcome.COMPLETED
    assert told(f"the program starts again, in {second.pod['metadata']['name']}") == 1


def test_an_end_that_the_cluster_wanted_is_none_before_it_is_known_that_none_follows(
    lab: Lab,
) -> None:
    lab.wait_for(explain_s=0.1, longest_wait_s=60.0)
    program, supervisor = lab.run(moves=True)
    supervisor.end(TOLD_TO_END)
    before = lab.clock.reads.total()
    assert not program.join(0.5)
    assert lab.clock.reads.total() < before + 200, "it does not wait, but looks all the time"
    program.request_stop("enough")
    assert program.wait(60).outcome is Outcome.STOPPED


def test_a_run_that_somebody_deletes_is_interrupted(lab: Lab, cluster: PretendedCluster) -> None:
    cluster.answers = False
    program, _ = lab.run()
    with cluster.store.changed:  # the cluster would do the same, at the same time
        cluster.store.delete("jobs", NAMESPACE, program.names.run)
        for pod in cluster.pods():
            cluster.store.delete("pods", NAMESPACE, pod["metadata"]["name"], grace_s=0)
    assert is_terminated(program)
    assert "the run was deleted" in reason_of(program)
    assert cluster.left() == []


@pytest.mark.parametrize("jobset", [False, True])
def test_a_run_that_somebody_deletes_before_it_is_watched_is_interrupted(
    lab: Lab, cluster: PretendedCluster, jobset: bool
) -> None:
    program = lab.detach(jobset=jobset)
    cluster.store.delete("jobsets" if jobset else "jobs", NAMESPACE, program.names.run)
    poll_until(lambda: cluster.left() == [])
    assert is_terminated(lab.attach(program))


@pytest.mark.parametrize("moves", [False, True])
def test_a_run_that_the_cluster_ends_after_its_longest_time_says_so(
    lab: Lab, cluster: PretendedCluster, moves: bool
) -> None:
    program, _ = lab.run(moves=moves)

    def limit(job: Object) -> None:
        job["spec"]["activeDeadlineSeconds"] = 0

    cluster.store.update("jobs", NAMESPACE, program.names.run, limit)
    assert is_terminated(program)
    assert "it has run for as long as max_run_s says (DeadlineExceeded: " in reason_of(program)


@pytest.mark.parametrize("key", [KEY, ANOTHER_KEY], ids=["the same key", "another key"])
def test_nothing_is_unpickled_that_the_run_has_not_sealed(lab: Lab, key: bytes) -> None:
    report = ExceptionReport.of(KeyError("a level"))
    program, supervisor = lab.run(key=key)
    failure = NodeFailure("actor[0]", "somewhere", "KeyError", report=report)
    supervisor.end(ProgramResult(Outcome.FAILED, (failure,)))
    with pytest.raises(NodeFailedError, match="KeyError") as caught:
        program.wait(60)
    assert type(caught.value.__cause__) is (KeyError if key == KEY else RemoteError)


# Faults of the API


def test_an_end_is_known_though_the_server_fails_at_that_time(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    cluster.api.faults.failures.append(Failure(500, 12, lambda *_: True, 0))
    cluster.drop()
    supervisor.end(COMPLETED)
    assert program.wait(30).outcome is Outcome.COMPLETED
    assert cluster.left() == []


@pytest.mark.parametrize("trouble", ["no server", "no rights"])
def test_a_program_outlives_a_server_that_is_away_or_refuses_for_long(
    lab: Lab, cluster: PretendedCluster, told: Told, trouble: str
) -> None:
    lab.wait_for(attempts=2, beat_s=0.05)
    program, supervisor = lab.run()
    poll_until(lambda: cluster.beat(supervisor))
    if trouble == "no rights":
        cluster.api.tokens[TOKEN] = frozenset()
        cluster.drop()
        why = '"resources": ["pods"], "verbs": ["patch"]'
    else:
        cluster.fail(500)
        why = "etcdserver: leader changed"
    poll_until(lambda: told("the program is not told that this process waits: "))
    cluster.heal()
    cluster.api.tokens[TOKEN] = RIGHTS
    poll_until(lambda: told("the program is told again that this process waits for it"))
    assert told("is not told") == 1
    assert told(why)
    assert program.result is None
    supervisor.end(COMPLETED)
    assert program.wait(60).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("right", "rule"),
    [
        (("get", "pods/log"), '"resources": ["pods/log"], "verbs": ["get"]'),
        (("watch", "pods"), '"resources": ["pods"], "verbs": ["watch"]'),
        (("list", "jobs"), '"resources": ["jobs"], "verbs": ["list"]'),
    ],
    ids=["logs", "watch", "list"],
)
def test_a_right_without_which_nothing_is_seen_is_named_and_nothing_left(
    lab: Lab, cluster: PretendedCluster, right: tuple[str, str], rule: str
) -> None:
    cluster.api.tokens[TOKEN] = RIGHTS - {right}
    program = lab.launch()
    with pytest.raises(LaunchError) as caught:
        program.await_up()
    assert rule in str(caught.value)
    poll_until(lambda: not cluster.left())


def test_who_may_not_stop_a_program_is_told_so(lab: Lab, cluster: PretendedCluster) -> None:
    program, _ = lab.run()
    cluster.api.tokens[TOKEN] = RIGHTS - {("delete", "pods"), ("delete", "jobs")}
    program.request_stop("enough")
    with pytest.raises(NodeFailedError, match=r'"resources": \["pods"\], "verbs": \["delete"\]'):
        program.wait(60)
    cluster.store.delete("jobs", NAMESPACE, program.names.run)


def test_who_may_not_remove_a_program_is_told_what_remains_though_all_went_well(
    lab: Lab, cluster: PretendedCluster, told: Told
) -> None:
    program, supervisor = lab.run()
    poll_until(lambda: cluster.beat(supervisor))
    cluster.api.tokens[TOKEN] = RIGHTS - {("delete", "pods"), ("delete", "jobs")}
    supervisor.end(COMPLETED)
    assert program.wait(60).outcome is Outcome.COMPLETED
    assert told("the program has ended; the run could not be removed: ") == 1
    assert told('"resources": ["jobs"], "verbs": ["delete"]')
    assert told(f"kubectl delete job {program.names.run} -n {NAMESPACE}") == 1
    cluster.store.delete("jobs", NAMESPACE, program.names.run)


def test_how_a_program_ended_is_told_before_the_pods_of_a_lost_machine_are_gone(
    lab: Lab, cluster: PretendedCluster, told: Told
) -> None:
    lab.wait_for(tell_s=0.2)
    program, supervisor = lab.run()
    host = program.names.host("actor", 0)
    name = cluster.pod(host)["metadata"]["name"]
    cluster.lost.add(MACHINE)
    supervisor.end(ProgramResult(Outcome.FAILED, (NodeFailure("actor[0]", host, "it broke"),)))
    how = f"the program has ended: actor[0] on {host} failed: it broke"
    poll_until(lambda: told(f"{how}; waits for the end of what is left: "))
    assert program.result is None
    assert told(f"Pod {name} on {MACHINE}")
    cluster.lost.clear()
    with pytest.raises(NodeFailedError):
        program.wait(60)


# Machines that do not answer. When which pod may be removed is what test_kubernetes_removal is about.


@pytest.fixture
def stuck_lab(lab: Lab) -> Lab:
    """A machine is soon taken for one that does not answer."""
    lab.wait_for(stuck_s=0.3, spare_s=0)
    return lab


def settle(cluster: PretendedCluster, program: Any, supervisor: Supervisor) -> None:
    """Waits until the supervisor's word came later than that all pods run."""
    for replica in (0, 1):
        cluster.pod(program.names.host("actor", replica))

    def is_known() -> bool:
        supervisor.tell(program)
        return len(program._departures._served) == 2

    poll_until(is_known)
    # What was said last may come after pods have ended, and then these served nobody.
    supervisor.tell(program, actor_0="serving")
    poll_until(lambda: any(each.state == "serving" for each in program.status()))


def test_a_pod_is_removed_and_replaced_once_its_node_is_lost_and_not_while_it_works(
    stuck_lab: Lab, cluster: PretendedCluster, told: Told
) -> None:
    program, supervisor = stuck_lab.run(moves=True, notice_s=0.0)
    settle(cluster, program, supervisor)
    works, lost = (cluster.pod(program.names.host("actor", each))["metadata"] for each in (0, 1))
    cluster.lost.add(MACHINE)
    for each in (works, lost):
        cluster.store.delete("pods", NAMESPACE, each["name"], grace_s=0)
    waits = f"machine {MACHINE} does not answer; pod {works['name']} is replaced when it is back"
    poll_until(lambda: told(waits))
    supervisor.tell(program, actor_1="restarting")
    poll_until(lambda: told(f"pod {lost['name']} is removed, because its machine does not answer"))
    assert lost["uid"] not in uids(cluster)
    poll_until(lambda: len(cluster.pods()) == 3)
    assert works["uid"] in uids(cluster)
    assert not cluster.requests(f"DELETE {PODS}/{works['name']}")
    assert told(waits) == 1
    cluster.lost.clear()
    poll_until(lambda: works["uid"] not in uids(cluster))


def test_a_supervisor_is_removed_once_it_cannot_work_and_the_program_begins_anew(
    stuck_lab: Lab, cluster: PretendedCluster, told: Told
) -> None:
    program, supervisor = stuck_lab.run(moves=True, notice_s=0.0, launcher_silence_s=300.0)
    settle(cluster, program, supervisor)
    stuck = supervisor.pod["metadata"]
    nodes = [cluster.pod(program.names.host("actor", each)) for each in (0, 1)]
    cluster.lost.add(ANOTHER_MACHINE)
    cluster.store.delete("pods", NAMESPACE, stuck["name"], grace_s=0)
    waits = f"machine {ANOTHER_MACHINE} does not answer; pod {stuck['name']} is replaced when"
    poll_until(lambda: told(waits))
    assert stuck["uid"] in uids(cluster)
    for node in nodes:
        cluster.end(node, 75)
    second = cluster.supervisor(2)
    assert stuck["uid"] not in uids(cluster)
    poll_until(lambda: told(f"the program starts again, in {second.pod['metadata']['name']}"))
    assert told(waits) == 1


LOST = (
    f"the machine {ANOTHER_MACHINE} of its supervisor is lost: its pod NAME was ended because its "
    "machine is not ready"
)
ENDED = (
    f"was ended by its supervisor, and how is not known: the machine {ANOTHER_MACHINE} of its pod "
    "NAME does not answer. .* nothing of this process, for which it waits 300 s"
)


@pytest.mark.parametrize(
    ("moves", "code", "expected"),
    [(False, None, LOST), (True, 0, ENDED)],
    ids=["may not begin anew", "has ended all nodes"],
)
def test_a_program_ends_with_the_machine_of_its_supervisor(
    stuck_lab: Lab, cluster: PretendedCluster, moves: bool, code: int | None, expected: str
) -> None:
    program, supervisor = stuck_lab.run(moves=moves, notice_s=0.0, launcher_silence_s=300.0)
    settle(cluster, program, supervisor)
    name = supervisor.pod["metadata"]["name"]
    cluster.lost.add(ANOTHER_MACHINE)
    cluster.condition(
        supervisor.pod, type="DisruptionTarget", status="True", reason="DeletionByTaintManager"
    )
    cluster.store.delete("pods", NAMESPACE, name, grace_s=0)
    if code is not None:
        cluster.end_together([program.names.host("actor", replica) for replica in (0, 1)], code)
    with pytest.raises(NodeFailedError, match=expected.replace("NAME", name)):
        program.wait(30)
    assert len(cluster.supervisors) == 1
    assert cluster.left() == []


def test_that_the_machine_of_a_supervisor_is_away_is_told_with_what_follows(
    lab: Lab, cluster: PretendedCluster, told: Told
) -> None:
    _, supervisor = lab.run(launcher_silence_s=300.0)
    poll_until(lambda: cluster.beat(supervisor))
    cluster.warn(supervisor.pod, "NodeNotReady", "Node is not ready")
    poll_until(lambda: told("after 300 s the supervisor stops it"))
    assert told(f"supervisor: the cluster gets no signal from the machine {ANOTHER_MACHINE}") == 1


def test_a_shell_that_attaches_removes_no_pod(stuck_lab: Lab, cluster: PretendedCluster) -> None:
    program = stuck_lab.detach()
    other = stuck_lab.attach(program)
    stuck = cluster.pod(program.names.host("actor", 0))["metadata"]
    cluster.is_lost = True
    cluster.store.delete("pods", NAMESPACE, stuck["name"], grace_s=0)
    stuck_lab.clock.advance(1000.0)
    assert not other.join(0.5)
    assert stuck["uid"] in uids(cluster)
    assert not cluster.requests("DELETE")
