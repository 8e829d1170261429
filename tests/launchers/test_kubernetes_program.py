"""What a program in a cluster asks of the API, and what it makes of the answers.

What follows from what is seen is tested in `test_kubernetes_state`, requests in
`test_kubernetes_client`, real pods in `test_kubernetes`.
"""

import contextlib
import dataclasses
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.hosts.elsewhere import ProgramEnd
from launchers.kubernetes._client import ApiError, Cancellation
from launchers.kubernetes._names import Names
from launchers.kubernetes._program import KubernetesProgram
from launchers.kubernetes._records import AnswerRecord, RecordWriter, StatusRecord, Up
from launchers.kubernetes._state import WaitLimits
from launchers.kubernetes._timing import Timing
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import LaunchOptions, NodeStatus, Outcome, ProgramResult
from launchpad_lite.testing import poll_until
from tests.launchers.kubernetes_seen import job, pod, refused, running, terminated, waiting

NAMES = Names.of("demo", ["actor"], "demo-x2x4z")
RUN = NAMES.run
HOST = f"{RUN}-actor-0"
SUPERVISOR, NODE = f"{RUN}-abcde", f"{HOST}-abcde"
KEY = b"of this run"
#: Nothing waits for long that is asked again.
BRIEF = Timing(
    look_s=0.02,
    log_pause_s=0.02,
    gather_s=0.02,
    settle_s=0.05,
    ask_again_s=0.05,
    beat_s=0.02,
    tell_s=0.1,
    gone_s=0.5,
    explain_s=0.2,
    spare_s=0,
)
COMPLETED = ProgramResult(Outcome.COMPLETED)


class Node:
    def run(self) -> None: ...


class Cluster:
    """The objects of a run, and the log of its supervisor, by the methods of an `Api`.

    Attributes:
        objects: Those that are there, by kind and name.
        requests: What was asked for, as "delete Job NAME".
        keeps: Whether pods stay that are deleted, as on a machine that does not answer.
        refuses: What is refused, as the beginning of a request, with how.
    """

    server, namespace = "https://there", "team"

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.requests: list[str] = []
        self.keeps = False
        self.refuses: dict[str, ApiError] = {}
        self.is_closed = False
        self._changed = threading.Condition()
        self._changes: list[tuple[Any, dict[str, Any]]] = []
        self._lines: list[str] = []
        self._breaks = 0
        self._writer = RecordWriter(-1, KEY)
        self._writer._writer.put = lambda data, **_: self._print(data)  # type: ignore[method-assign]
        for each in (job(RUN, active=1), job(f"{RUN}-actor", active=1)):
            self.put(each)
        owner = {"ownerReferences": [{"name": RUN}]}
        self.objects["Job", f"{RUN}-actor"]["metadata"].update(owner)
        for kind, name in (("Service", RUN), ("Secret", f"{RUN}-trust")):
            self.put({"kind": kind, "metadata": {"name": name, "uid": name, **owner}})

    # What happens

    def put(self, obj: dict[str, Any]) -> None:
        with self._changed:
            key = obj["kind"], obj["metadata"]["name"]
            change = "MODIFIED" if key in self.objects else "ADDED"
            self.objects[key] = obj
            self._changes.append((change, obj))
            self._changed.notify_all()

    def run(self) -> None:
        """Has all pods run, and the supervisor place its node."""
        self.put(_owned(running(RUN, container="supervisor", uid="s")))
        self.put(_owned(running(HOST, uid="1")))
        self.say(lambda records: records.say(Up()))
        self.say_status("running")

    def say(self, write: Callable[[RecordWriter], None]) -> None:
        write(self._writer)

    def say_status(self, state: str) -> None:
        self.say(
            lambda records: records.say(StatusRecord((NodeStatus("actor[0]", state, HOST, 1, {}),)))
        )

    def end(self, result: ProgramResult, code: int = 0) -> None:
        self.say(lambda records: records.end(ProgramEnd(result, {"actor[0]": "its threads"})))
        self.end_supervisor(code)

    def end_supervisor(self, code: int) -> None:
        gone = pod(RUN, container="supervisor", uid="s", phase="Failed", state=terminated(code))
        self.put(_owned(gone))

    def break_logs(self) -> None:
        with self._changed:
            self._breaks += 1
            self._changed.notify_all()

    def left(self) -> list[str]:
        return [" ".join(key) for key in self.objects]

    def _print(self, data: bytes) -> bool:
        with self._changed:
            stamp = "2026-01-01T00:00:00.000000001Z"
            self._lines += [f"{stamp} {line}" for line in data.decode().splitlines()]
            self._changed.notify_all()
        return True

    # The methods of an Api

    def _ask(self, request: str) -> None:
        self.requests.append(request)
        for start, error in self.refuses.items():
            if request.startswith(start):
                raise error

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        self._ask(f"get {kind} {name}")
        return self.objects.get((kind, name))

    def list(self, kind: str, selector: str = "", **_: Any) -> list[dict[str, Any]]:
        self._ask(f"list {kind}")
        found = [each for (own, _), each in self.objects.items() if own == kind]
        if "role=supervisor" in selector:
            found = [each for each in found if each["spec"]["hostname"] == RUN]
        return found

    def patch(self, kind: str, name: str, body: Any, **_: Any) -> None:
        self._ask(f"patch {kind} {name} {body}")

    def delete(self, kind: str, name: str, *, grace_s: int | None = None, **_: Any) -> bool:
        self._ask(f"delete {kind} {name} {grace_s}")
        with self._changed:
            if (found := self.objects.get((kind, name))) is None:
                return False
            gone = [(kind, name)]
            if name == RUN:  # as the garbage collector
                gone += [key for key, each in self.objects.items() if _is_owned(each)]
            for key in gone:
                each = self.objects[key]
                if key[0] == "Pod" and self.keeps and grace_s != 0:
                    before = each["metadata"].get("deletionGracePeriodSeconds", 600)
                    grace = {"deletionGracePeriodSeconds": min(before, grace_s or 600)}
                    each["metadata"] |= {"deletionTimestamp": "now", **grace}
                    self._changes.append(("MODIFIED", each))
                else:
                    self._changes.append(("DELETED", self.objects.pop(key)))
            self._changed.notify_all()
            return bool(found)

    def watch(
        self, kind: str, selector: str = "", *, cancellation: Cancellation, **_: Any
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        self._ask(f"watch {kind}")
        seen = 0
        while not cancellation.is_set():
            if seen:
                yield "LISTED", {"kind": kind}
            with self._changed:
                new, seen = self._changes[seen:], len(self._changes)
                if not new:
                    self._changed.wait(0.02)
            yield from (each for each in new if each[1]["kind"] == kind)

    def logs(
        self, name: str, container: str, *, follow: bool = False, **options: Any
    ) -> Iterator[str]:
        self._ask(f"get log of {name}")
        if name != SUPERVISOR:
            yield "the last words"
            return
        cancellation = options.get("cancellation") or Cancellation()
        seen, breaks = 0, self._breaks
        while True:
            with self._changed:
                new, seen = self._lines[seen:], len(self._lines)
                supervisor = self.objects.get(("Pod", SUPERVISOR))
                is_over = supervisor is None or supervisor["status"]["phase"] == "Failed"
                if not new and (not follow or is_over):
                    return
                if not new:
                    self._changed.wait(0.02)
            yield from new
            if cancellation.is_set() or breaks < self._breaks:
                return

    def close(self) -> None:
        self.is_closed = True


def _owned(obj: dict[str, Any]) -> dict[str, Any]:
    obj["metadata"]["ownerReferences"] = [{"name": RUN}]
    return obj


def _is_owned(obj: dict[str, Any]) -> bool:
    return bool(obj["metadata"].get("ownerReferences"))


class Lab:
    """Launches a program in a cluster, and attaches to it; no thread is left behind."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster()
        self.log_dir = folder / "logs"
        self.timing = dataclasses.replace(BRIEF, first_status_s=10.0)
        self.programs: list[KubernetesProgram] = []
        program = lp.Program("demo")
        program.add_node(lp.PyClassNode(Node), label="actor")
        self.plan = lp.plan(program, "local_mp")

    def launch(self, notice_s: float = 0.2) -> KubernetesProgram:
        return self._watch(
            is_launch=True,
            log_dir=self.log_dir,
            notice_s=notice_s,
            limits=WaitLimits(notice_s, 30.0, 0.1),
        )

    def run(self, **options: Any) -> KubernetesProgram:
        """Returns a program that was launched, whose node is placed."""
        program = self.launch(**options)
        self.cluster.run()
        program.await_up()
        return program

    def attach(self) -> KubernetesProgram:
        return self._watch()

    def _watch(self, notice_s: float = 0.2, **options: Any) -> KubernetesProgram:
        api: Any = self.cluster
        launch = LaunchOptions(notice_s)
        program = KubernetesProgram(
            self.plan, launch, api, NAMES, KEY, timing=self.timing, **options
        )
        self.programs.append(program)
        program.watch()
        return program


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    before = {*threading.enumerate()}
    found = Lab(tmp_path)
    yield found
    found.cluster.refuses.clear()
    found.cluster.objects.clear()
    for each in found.programs:
        each.kill()
        assert each.join(20)
    # That of signals stays as their handlers do.
    poll_until(
        lambda: {each.name for each in {*threading.enumerate()} - before} <= {"signal-waker"}
    )
    assert found.cluster.is_closed


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[str], int]:
    """Counts how often something was told so far."""
    said = ""

    def count(text: str) -> int:
        nonlocal said
        said += capsys.readouterr().err
        return len(re.findall(text, said))

    return count


Told = Callable[[str], int]


# Logs


def test_output_and_the_end_arrive_once_through_connections_that_break(
    lab: Lab, told: Told
) -> None:
    program = lab.run()
    log = lab.log_dir / "actor" / "0.log"
    for number in range(4):
        line = b"%d\n" % number
        lab.cluster.say(lambda records, line=line: records.show("actor[0]", line))
        poll_until(lambda line=line: log.exists() and log.read_bytes().endswith(line))
        lab.cluster.break_logs()
    lab.cluster.end(COMPLETED)
    assert program.wait(20).outcome is Outcome.COMPLETED
    assert lab.cluster.left() == []
    assert list(program.output()) == [("actor[0]", b"%d\n" % number) for number in range(4)]


def test_another_shell_asks_where_threads_are(lab: Lab) -> None:
    lab.run()
    other = lab.attach()

    def answer() -> None:
        asked = poll_until(
            lambda: re.findall(r"launchpad-lite/stacks': '([^']+)'", " ".join(lab.cluster.requests))
        )
        assert json.loads(asked[0])[1] == "stacks"
        text = json.dumps({"value": {"actor[0]": "in run"}, "error": ""})
        lab.cluster.say(lambda records: records.say(AnswerRecord("of another", "{}")))
        lab.cluster.say(lambda records: records.say(AnswerRecord(asked[0], text)))

    thread = threading.Thread(target=answer)
    thread.start()
    assert other.stacks() == {"actor[0]": "in run"}
    thread.join()


def test_without_a_supervisor_nobody_tells_where_threads_are(lab: Lab) -> None:
    with pytest.raises(LaunchError, match=f"no supervisor of the run {RUN} runs"):
        lab.attach().stacks()


def test_the_status_in_another_shell_is_the_newest_one_and_knows_the_end(lab: Lab) -> None:
    lab.run()
    lab.cluster.say(lambda records: records.show("actor[0]", b"hello\n" * 300))
    lab.cluster.say_status("serving")
    assert [each.state for each in lab.attach().status()] == ["serving"]
    lab.cluster.end(COMPLETED)
    other = lab.attach()
    assert [each.state for each in other.status()] == ["serving"]
    assert other.result == COMPLETED


# The launching process shows that it lives


def test_the_supervisor_is_shown_that_the_launching_process_lives(lab: Lab, told: Told) -> None:
    program = lab.run()
    beats = f"patch Pod {SUPERVISOR} .*launchpad-lite/launcher"
    poll_until(lambda: len(re.findall(beats, "\n".join(lab.cluster.requests))) > 2)
    lab.cluster.refuses["patch Pod"] = refused(500, is_final=False)
    poll_until(lambda: told("the program is not told that this process waits: "))
    lab.cluster.refuses.clear()
    poll_until(lambda: told("the program is told again that this process waits for it"))
    assert told("is not told") == 1
    assert program.result is None


# Stops, and what is left


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_during_a_launch_returns_only_when_nothing_is_left_of_it(
    lab: Lab, presses: int
) -> None:
    program = lab.launch(notice_s=0.2 if presses == 1 else 600.0)
    lab.cluster.keeps = True
    lab.cluster.put(_owned(running(HOST, uid="1")))

    def interrupt() -> None:
        program._thread.join(0.1)
        for _ in range(presses):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            poll_until(lambda: "list Job" in lab.cluster.requests)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        program.await_up()
    thread.join()
    assert lab.cluster.left() == []


def test_pods_that_have_only_begun_are_not_waited_for_as_long_as_their_notice(lab: Lab) -> None:
    program = lab.launch(notice_s=600.0)
    lab.cluster.keeps = True
    lab.cluster.put(_owned(pod(HOST, state=waiting("ErrImagePull"), uid="1")))
    program.request_stop("enough")
    poll_until(lambda: f"delete Pod {NODE} 1" in lab.cluster.requests)


def test_what_still_runs_on_a_machine_that_does_not_answer_is_named(lab: Lab, told: Told) -> None:
    program = lab.run()
    lab.cluster.keeps = True
    program.handle_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        program.wait(20)
    assert told(r"stopping 'demo' \(SIGINT\)")
    assert f"may still run, as their machines do not answer: Pod {SUPERVISOR} on machine-1" in (
        program.result.reason
    )
    assert told("they may still run")


def test_what_has_no_owner_is_deleted_by_itself(lab: Lab, told: Told) -> None:
    for each in lab.cluster.objects.values():
        each["metadata"].pop("ownerReferences", None)
    lab.cluster.run()
    assert lab.attach().stop(20).outcome is Outcome.STOPPED
    assert lab.cluster.left() == []


def test_a_run_that_was_seen_to_have_ended_is_still_removed(lab: Lab) -> None:
    lab.cluster.run()
    lab.cluster.end(COMPLETED)
    other = lab.attach()
    assert other.join(20)
    assert lab.cluster.left() != []
    assert other.stop(20) == COMPLETED
    assert lab.cluster.left() == []


def test_what_has_no_owner_and_may_not_be_listed_is_said_to_remain(lab: Lab) -> None:
    for each in lab.cluster.objects.values():
        each["metadata"].pop("ownerReferences", None)
    lab.cluster.refuses["list Secret"] = refused()
    result = lab.attach().stop(20)
    assert f"kubectl delete secrets -n team -l launchpad-lite/run={RUN}" in result.reason
    assert lab.cluster.left() == [f"Secret {RUN}-trust"]


def test_who_may_not_remove_a_program_is_told_what_remains_though_all_went_well(
    lab: Lab, told: Told
) -> None:
    program = lab.run()
    lab.cluster.refuses["delete"] = refused()
    lab.cluster.end(COMPLETED)
    assert program.wait(20).outcome is Outcome.COMPLETED
    assert told("the program has ended; the run could not be removed: we may not") == 1
    assert told(f"kubectl delete job {RUN} -n team") == 1


def test_an_interrupted_launch_says_what_remains_while_a_server_has_just_begun(
    lab: Lab, told: Told
) -> None:
    program = lab.launch()
    lab.cluster.refuses["delete"] = refused(is_final=False)
    program.request_stop("SIGINT", signal.SIGINT)
    assert program.join(20)
    assert told("the program cannot be stopped yet: it has just begun")
    assert told(f"could not be removed: it has just begun.* kubectl delete job {RUN} -n team") == 1


def test_how_a_program_ended_is_told_before_the_pods_of_a_lost_machine_are_gone(
    lab: Lab, told: Told
) -> None:
    program = lab.run(notice_s=600.0)
    lab.cluster.keeps = True
    failure = lp.launching.NodeFailure("actor[0]", HOST, "it broke")
    lab.cluster.end(ProgramResult(Outcome.FAILED, (failure,)), 1)
    poll_until(
        lambda: told(rf"actor\[0\] on {HOST} failed: it broke; waits for the end of what is")
    )
    assert program.result is None
    assert told(f"Pod {NODE} on machine-1")


def test_a_right_without_which_nothing_is_seen_ends_the_launch(lab: Lab) -> None:
    lab.cluster.refuses["watch Pod"] = refused()
    with pytest.raises(LaunchError, match="we may not"):
        lab.launch().await_up()
    assert lab.cluster.left() == []


def test_a_launch_that_another_shell_stops_before_it_is_up_ends_well(lab: Lab) -> None:
    program = lab.launch()
    stopped = job(RUN)
    stopped["metadata"]["annotations"] = {"launchpad-lite/stop": "somebody else"}
    lab.cluster.put(stopped)
    with contextlib.suppress(LaunchError):
        lab.attach().stop(20)
    program.await_up()
    result = program.wait(20)
    assert result.outcome is Outcome.STOPPED
    assert "somebody else" in result.reason


def test_a_pod_is_removed_by_force_with_what_holds_it(lab: Lab, told: Told) -> None:
    program = lab.run()
    held = _owned(running(HOST, uid="1"))
    held["metadata"]["finalizers"] = ["batch.kubernetes.io/job-tracking", "another"]
    lab.cluster.put(held)
    program._remove_pod(held)
    assert f"delete Pod {NODE} 0" in lab.cluster.requests
    assert any("'finalizers': ['another']" in each for each in lab.cluster.requests)
    program._remove_pod({**held, "metadata": {**held["metadata"], "uid": "of another"}})
    assert lab.cluster.requests.count(f"delete Pod {NODE} 0") == 1
    poll_until(lambda: told("is removed, because its machine does not answer") == 1)


def test_a_launch_that_leaves_at_once_holds_nothing(lab: Lab) -> None:
    api: Any = lab.cluster
    program = KubernetesProgram(lab.plan, LaunchOptions(1.0), api, NAMES)
    program.detach("run", "demo", "is created")
    program.kill()
    assert program.wait(1).outcome is Outcome.COMPLETED
    assert lab.cluster.is_closed


def test_a_folder_for_logs_that_cannot_be_written_is_told_before_anything_is_watched(
    lab: Lab, tmp_path: Path
) -> None:
    lab.log_dir = tmp_path / "file"
    lab.log_dir.write_text("")
    with pytest.raises(LaunchError, match=r"cannot write logs: .*file.*log_dir="):
        lab.launch()
    lab.cluster.close()
