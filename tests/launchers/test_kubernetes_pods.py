"""What becomes of nodes, pods and their supervisor when any of them ends, without Kubernetes."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import courier
import launchpad_lite as lp
from launchers.host.pod import MAY_COME_BACK
from launchpad_lite.testing import LaunchedProgram, poll_until
from launchpad_lite.testing.programs import call_until_answered
from tests.launchers import counting
from tests.launchers.pods import Cluster, Pod, open_files


@pytest.fixture(autouse=True, scope="module")
def _travels_by_value() -> Iterator[None]:
    """Pods are up sooner if they need not import what tests need."""
    modules = (sys.modules[__name__], counting)
    for each in modules:
        cloudpickle.register_pickle_by_value(each)
    yield
    for each in modules:
        cloudpickle.unregister_pickle_by_value(each)


QUICK = lp.RestartPolicy(backoff_s=0.01, max_restarts=50)
COUNTER, CALLER, RUNNER = "run-counter-0", "run-caller-0", "run-runner0-0"


# Nodes


def add_some(counter: Any, calls: int) -> None:
    for _ in range(calls):
        print("it is", counter.add(), flush=True)


def fail() -> None:
    raise ValueError("boom")


def wait_for_stop() -> None:
    lp.wait_for_stop()


def call_until_stopped(counter: Any, marks: Path) -> None:
    """Calls without pause; the file of marks grows with each call that was answered."""
    while not lp.wait_for_stop(0.01):
        with contextlib.suppress(courier.ServerLostError):
            counter.add()
            with marks.open("ab") as file:
                file.write(b".")


def note_stop(marks: Path) -> None:
    lp.wait_for_stop()
    with marks.open("ab") as file:
        file.write(b"told ")


def never_listen() -> None:
    threading.Event().wait()


def start_family() -> None:
    """Leaves processes behind that nobody finds by session or group."""
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(1000)"])
    lp.wait_for_stop()


def print_much(megabytes: int) -> None:
    line = b"x" * 999 + b"\n"
    for _ in range(megabytes * 10):
        os.write(1, line * 100)


def write_here() -> None:
    Path("what-the-node-wrote").write_text("words")
    print(Path.cwd(), flush=True)


# Programs


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Code that pods have: shipped to the first of them only."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cluster(tmp_path: Path, trust: Path, cache: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, trust, cache) as cluster:
        yield cluster


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """A file that nodes write to."""
    path = tmp_path / "marks"
    path.touch()
    return path


def with_nodes(*others: lp.PyNode) -> lp.Program:
    """A program with a service, and nodes that run."""
    program = lp.Program("pods")
    program.add_node(lp.CourierNode(counting.Counter), label="counter")
    for index, other in enumerate(others):
        program.add_node(other, label=f"runner{index}")
    return program


def with_caller(call: Callable[..., None], *how: object) -> lp.Program:
    """A service, and a node that calls it."""
    program = lp.Program("pods")
    counter = program.add_node(lp.CourierNode(counting.Counter), label="counter")
    program.add_node(lp.PyNode(call, counter, *how), label="caller")
    return program


def goes_on(marks: Path) -> None:
    """Waits until calls are answered that began after this one was called."""
    size = marks.stat().st_size
    poll_until(lambda: marks.stat().st_size >= size + 3, 60)


def goes_on_to_its_end(cluster: Cluster, launched: LaunchedProgram, marks: Path) -> None:
    """Waits until calls are answered, and stops the program."""
    goes_on(marks)
    assert launched.stop().outcome is lp.Outcome.STOPPED
    assert cluster.ends() == {COUNTER: 0, CALLER: 0}


def await_state(launched: LaunchedProgram, index: int, state: str) -> None:
    poll_until(lambda: launched.running.status()[index].state == state, 60)


def restarts(launched: LaunchedProgram) -> dict[str, int]:
    return {each.name: each.restarts for each in launched.running.status()}


def await_restart(launched: LaunchedProgram, node: str, count: int = 1) -> None:
    poll_until(lambda: restarts(launched)[node] == count, 60)


# How pods end


def test_pods_of_a_program_that_ends_well_end_well(cluster: Cluster) -> None:
    result = cluster.launch(with_caller(add_some, 3)).wait()
    assert result.outcome is lp.Outcome.COMPLETED
    assert cluster.ends() == {COUNTER: 0, CALLER: 0}
    assert cluster.shown.last["caller[0]"] == b"it is 1\nit is 2\nit is 3\n"
    # `kubectl logs` of a pod shows it, too.
    assert cluster.pods[CALLER].errors.read_bytes() == cluster.shown.last["caller[0]"]


def test_the_pod_of_a_node_that_failed_and_no_other_fails(cluster: Cluster) -> None:
    launched = cluster.launch(with_nodes(lp.PyNode(fail)))
    with pytest.raises(lp.NodeFailedError, match="boom"):
        launched.wait()
    assert cluster.ends() == {COUNTER: 0, RUNNER: 1}


@pytest.mark.parametrize("is_writable", [True, False])
def test_nodes_begin_where_the_supervisor_did_if_they_can_write_there(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writable: bool
) -> None:
    """Most of a pod's files are read-only, the folder that its image begins in, too."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path if is_writable else "/proc")
    program = lp.Program("pods")
    program.add_node(lp.PyNode(write_here), label="writer")
    assert cluster.launch(program).wait().outcome is lp.Outcome.COMPLETED
    expected = tmp_path if is_writable else home
    assert cluster.shown.last["writer[0]"].decode().strip() == str(expected)
    assert (expected / "what-the-node-wrote").read_text() == "words"


# Pods that are lost


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_node_goes_on_in_the_next_pod_and_its_callers_with_it(
    cluster: Cluster, marks: Path
) -> None:
    first = lp.Program("first")  # some of it a process keeps
    first.add_node(lp.PyNode(int), label="none")
    lp.launch(first, "local_mt").wait()
    files = open_files()
    threads = {thread.name for thread in threading.enumerate()}
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK)
    goes_on(marks)
    cluster.replace(COUNTER)
    await_restart(launched, "counter[0]")
    goes_on_to_its_end(cluster, launched, marks)
    assert restarts(launched) == {"counter[0]": 1, "caller[0]": 0}
    # Nothing is left; it is fewer, if what came before had not quite gone when it was counted.
    poll_until(lambda: {thread.name for thread in threading.enumerate()} <= threads)
    held = 1  # the port of the service
    poll_until(lambda: open_files() <= files + held)


@pytest.mark.slow
def test_a_pod_that_comes_before_its_predecessor_was_missed_takes_its_place(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK)
    goes_on(marks)
    before = cluster.pods[COUNTER]
    cluster.may_wait.clear()  # until the port is free, which here it shares with the next pod
    cluster.start(COUNTER)
    assert before.end() == MAY_COME_BACK
    cluster.may_wait.set()
    await_restart(launched, "counter[0]")
    goes_on_to_its_end(cluster, launched, marks)


@pytest.mark.slow
def test_the_failure_tells_that_no_other_pod_has_come(cluster: Cluster, marks: Path) -> None:
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK, wait_s=0.3)
    cluster.pods[COUNTER].crash()
    with pytest.raises(lp.NodeFailedError, match=r"lost: the link to it broke: \S") as raised:
        launched.wait()
    assert "no pod could take its place: run-counter-0: it did not answer in time" in str(
        raised.value
    )


@pytest.mark.parametrize(
    ("how", "code", "is_waiting"),
    [("stop", 0, True), pytest.param("kill", 1, False, marks=pytest.mark.slow)],
)
def test_a_program_that_is_ended_waits_for_no_pod(
    cluster: Cluster, marks: Path, how: str, code: int, is_waiting: bool
) -> None:
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK, wait_s=300.0)
    cluster.pods[COUNTER].crash()
    if is_waiting:
        await_restart(launched, "counter[0]")
    if how == "kill":
        launched.running.kill()
    else:
        launched.running.request_stop("enough")
    assert launched.running.join(60)
    assert cluster.pods[CALLER].end() == code


@pytest.mark.slow
def test_a_program_that_is_ended_when_it_was_about_to_wait_does_not_begin_to(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK, wait_s=300.0)
    cluster.is_about_to_wait.clear()
    cluster.may_wait.clear()
    cluster.pods[COUNTER].crash()
    assert cluster.is_about_to_wait.wait(60)
    launched.running.request_stop("enough")
    poll_until(lambda: {each.state for each in launched.running.status()} == {"ended"})
    cluster.may_wait.set()
    assert launched.running.join(60)
    assert cluster.pods[CALLER].end() == 0


@pytest.mark.slow
def test_a_pod_that_is_lost_while_it_takes_the_place_of_another_has_a_successor(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK)
    goes_on(marks)
    cluster.pods[COUNTER].crash()
    served = cluster.exchange._served
    for _ in range(3):
        before = served.get(COUNTER)
        pod = cluster.start(COUNTER)
        poll_until(lambda before=before: served.get(COUNTER) not in (before, None))
        pod.crash()
    cluster.start(COUNTER)
    goes_on_to_its_end(cluster, launched, marks)


@pytest.mark.slow
def test_a_pod_that_is_lost_before_its_node_is_started_has_a_successor(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK)
    goes_on(marks)
    cluster.lose_the_next(COUNTER)
    cluster.replace(COUNTER)
    await_restart(launched, "counter[0]", 2)
    goes_on_to_its_end(cluster, launched, marks)


@pytest.mark.slow
def test_when_pods_can_call_no_more_nodes_do_not_wait_for_new_ones(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK, wait_s=300.0)
    goes_on(marks)
    cluster.exchange.close()
    assert launched.running.join(60)
    assert launched.running.result.outcome is lp.Outcome.FAILED
    assert "the supervisor takes no calls any more" in str(launched.running.failure())
    launched.running.collected = True


def binds(listener: socket.socket, port: int) -> bool:
    with contextlib.suppress(OSError):
        listener.bind(("127.0.0.1", port))
        listener.listen()
        return True
    return False


@pytest.mark.slow
def test_a_pod_that_cannot_take_its_node_may_be_followed_by_another(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(call_until_stopped, marks), restart=QUICK)
    goes_on(marks)
    cluster.pods[COUNTER].crash()
    (address,) = launched.running.plan.addresses
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        poll_until(lambda: binds(taken, address.port))
        assert cluster.start(COUNTER).end() == MAY_COME_BACK
    cluster.start(COUNTER)
    goes_on_to_its_end(cluster, launched, marks)


# Pods that are told to end


def test_a_node_hears_of_the_end_of_its_pod_and_has_its_state_in_the_next(
    cluster: Cluster, tmp_path: Path, marks: Path
) -> None:
    # The policy allows no failure: a notice is none.
    policy = lp.RestartPolicy(max_restarts=0, backoff_s=0.01)
    launched = cluster.launch(
        with_nodes(lp.PyNode(note_stop, marks)),
        restart=policy,
        checkpoints=tmp_path / "checkpoints",
    )
    client = launched.client("counter")
    assert client.add(5) == 5
    await_state(launched, 1, "running")
    before = dict(cluster.pods)
    for pod in before.values():
        pod.terminate()
    for host, pod in before.items():
        assert pod.end() == MAY_COME_BACK
        cluster.start(host)
    assert call_until_answered(client.add) == 6
    assert marks.read_bytes() == b"told "
    await_restart(launched, "runner0[0]")
    await_state(launched, 1, "running")
    for restart in launched.stop().restarts:
        assert "asked from outside to end, by SIGTERM" in restart.failure.summary
    assert restarts(launched) == {"counter[0]": 1, "runner0[0]": 1}
    assert marks.read_bytes() == b"told told "
    assert cluster.ends() == {COUNTER: 0, RUNNER: 0}


@pytest.mark.slow
def test_a_node_that_does_not_listen_is_ended_after_its_notice_and_goes_on_elsewhere(
    cluster: Cluster,
) -> None:
    launched = cluster.launch(with_nodes(lp.PyNode(never_listen)), restart=QUICK, notice_s=0.3)
    await_state(launched, 1, "running")
    cluster.pods[RUNNER].terminate()
    assert cluster.pods[RUNNER].end() == MAY_COME_BACK
    cluster.start(RUNNER)
    await_restart(launched, "runner0[0]")
    await_state(launched, 1, "running")


@pytest.mark.slow
def test_a_pod_whose_node_has_ended_may_be_replaced_by_one_that_does_nothing(
    cluster: Cluster,
) -> None:
    launched = cluster.launch(with_nodes(lp.PyNode(print_much, 0), lp.PyNode(wait_for_stop)))
    await_state(launched, 1, "ended")
    cluster.pods[RUNNER].terminate()
    assert cluster.pods[RUNNER].end() == MAY_COME_BACK
    other = cluster.start(RUNNER)
    poll_until(lambda: len(other.processes()) == 2)
    assert launched.stop().outcome is lp.Outcome.STOPPED
    cluster.exchange.close()
    assert cluster.ends() == {COUNTER: 0, RUNNER: MAY_COME_BACK, "run-runner1-0": 0}


def test_a_pod_ends_by_a_signal_before_anybody_has_answered_it(tmp_path: Path, trust: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pod = Pod("run-a-0", tmp_path, trust, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1)
            pod.terminate()
            assert pod.end() == MAY_COME_BACK


def test_a_pod_gives_up_when_there_is_no_supervisor(tmp_path: Path, trust: Path) -> None:
    with socket.socket() as held:  # so that nobody else listens there
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        pod = Pod("run-a-0", tmp_path, trust, port, wait_s=0.5)
        # Nor is another one needed: the run may be over, with nobody left to say so.
        assert pod.end() == 1
    assert f"the supervisor, 127.0.0.1:{port}, is not there" in pod.errors.read_text()


# The end of the supervisor


def test_pods_of_a_program_that_begins_anew_may_come_back(cluster: Cluster, marks: Path) -> None:
    launched = cluster.launch(
        with_caller(call_until_stopped, marks), restart=QUICK, comes_back=True
    )
    goes_on(marks)
    launched.stop()
    assert cluster.ends() == {COUNTER: MAY_COME_BACK, CALLER: MAY_COME_BACK}


@pytest.mark.slow
def test_pods_end_with_all_that_nodes_started_when_the_supervisor_has_gone(
    cluster: Cluster,
) -> None:
    # They end long before they are silent for too long.
    cluster.launch(with_nodes(lp.PyNode(start_family)), silence_s=300.0)
    poll_until(lambda: len(cluster.pods[RUNNER].processes()) >= 6)
    cluster.exchange.close()
    assert set(cluster.ends().values()) == {MAY_COME_BACK}


# Much at once


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_up_neither_the_node_nor_the_end_of_its_pod(
    cluster: Cluster,
) -> None:
    read, write = os.pipe()
    try:
        cluster.start(COUNTER)
        cluster.start(RUNNER, output=write)
        launched = cluster.launch(with_nodes(lp.PyNode(print_much, 1)), pods=False, silence_s=20.0)
        assert launched.wait(60).outcome is lp.Outcome.COMPLETED
        assert cluster.shown.sizes["runner0[0]"] == 1_000_000
        assert cluster.ends() == {COUNTER: 0, RUNNER: 0}
    finally:
        os.close(read)
        os.close(write)
