"""The contract of every launcher, as tests to subclass."""

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.testing.programs import call_until_answered, poll_until

if TYPE_CHECKING:
    from launchpad_lite.launching import Launcher
    from launchpad_lite.testing.programs import ProgramLauncher


class Counter:
    """A server with state, streams and errors."""

    def __init__(self, start: int = 0) -> None:
        self._value = start

    def increment(self, by: int = 1) -> int:
        self._value += by
        return self._value

    def countdown(self, start: int) -> Any:
        yield from range(start, 0, -1)

    def fail(self) -> None:
        raise KeyError("the contract's error")

    def stop_program(self) -> None:
        lp.stop()

    def thread_stops_program(self) -> None:
        thread = threading.Thread(target=lp.stop)
        thread.start()
        thread.join()


class CallingNode:
    """Calls counters when it runs."""

    def __init__(self, counters: list[Any], target: int) -> None:
        self._counters = counters
        self._target = target

    def run(self) -> None:
        for counter in self._counters:
            for _ in range(self._target):
                counter.futures.increment().result()
            assert list(counter.countdown(3)) == [3, 2, 1]
            with pytest.raises(KeyError):
                counter.fail()


class FailingNode:
    """Fails in the constructor or when it runs."""

    def __init__(self, where: str) -> None:
        self._where = where
        if where == "constructor":
            raise ValueError("broken constructor")

    def run(self) -> None:
        raise ValueError(f"broken {self._where}")


def run_for_ever() -> None:
    """Ignores the stop."""
    while True:
        time.sleep(0.01)


def linger(file: str) -> None:
    """Ends some time after it was asked to stop: when a file is there."""
    lp.wait_for_stop()
    poll_until(Path(file).exists, timeout_s=30)


def call_for_ever(counter: Any) -> None:
    """Calls another and never checks for the stop, as most actors do."""
    while True:
        counter.increment()


def register_late(file: str) -> None:
    """Registers its stop handler after the stop."""
    lp.wait_for_stop()
    lp.register_stop_handler(Path(file).touch)


class Unsteady:
    """Counts, saves its count, and fails or gets stuck on request."""

    def __init__(self) -> None:
        self._count = 0
        self._task = ""

    def increment(self) -> tuple[int, int]:
        """Adds one; returns the sum and how often the node was restarted."""
        self._count += 1
        return self._count, lp.restart_count()

    def keep(self) -> None:
        lp.save_checkpoint()

    def give(self, task: str) -> None:
        """Makes `run` `fail` or get `stuck`."""
        self._task = task

    def save(self, folder: Path) -> None:
        (folder / "count").write_text(str(self._count))

    def restore(self, folder: Path) -> None:
        self._count = int((folder / "count").read_text())

    def run(self) -> None:
        while not lp.wait_for_stop(0.01):
            if self._task != "stuck":
                lp.heartbeat()
            if self._task == "fail":
                raise RuntimeError("told to fail")


class Parting:
    """Writes the time of its stop, and makes a last call to another."""

    def __init__(self, name: str, log: str, other: Any = None) -> None:
        self._name = name
        self._log = Path(log)
        self._other = other

    def note(self, line: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{line}\n")

    def run(self) -> None:
        self.note(f"{self._name} is up")
        lp.wait_for_stop()
        self.note(f"{self._name} is asked")
        if self._other is not None:
            self._other.note(f"{self._name} leaves")


class LauncherContract:
    """Subclass it with the name of a launcher; each test is a promise to users.

    Example:
        class TestMine(LauncherContract):
            launcher = "mine"
    """

    #: The launcher under test, or its name.
    launcher: "str | Launcher"
    #: Arguments of `lp.launch` for it.
    options: dict[str, Any] = {}

    @pytest.fixture
    def launch(self, launch_program: "ProgramLauncher") -> Any:
        def launch(program: lp.Program, **options: Any) -> Any:
            return launch_program(program, self.launcher, **{**self.options, **options})

        return launch

    def test_nodes_call_one_another_and_the_program_ends_by_itself(self, launch: Any) -> None:
        program = lp.Program("calls")
        with program.group("counter"):
            counters = [program.add_node(lp.CourierNode(Counter, i)) for i in range(2)]
        with program.group("caller"):
            for _ in range(2):
                program.add_node(lp.CourierNode(CallingNode, counters, 5))
        result = launch(program, notice_s=30.0).wait()
        assert result.outcome is lp.Outcome.COMPLETED
        assert result.exit_code == 0
        assert result.killed == ()

    def test_handles_in_a_cycle_become_clients_also_in_the_launching_process(
        self, launch: Any
    ) -> None:
        program = lp.Program("cycle")
        first = lp.CourierNode(Counter)
        second = lp.CourierNode(CallingNode, [first.create_handle()], 1)
        second.disable_run()
        handle = program.add_node(second, label="second")
        program.add_node(first, label="first")
        first.configure(start=3)
        assert handle is not None
        assert launch(program).client("first").increment(by=5) == 8

    @pytest.mark.parametrize("method", ["stop_program", "thread_stops_program"])
    def test_a_handler_and_a_thread_of_a_node_can_stop_the_program(
        self, launch: Any, method: str
    ) -> None:
        program = _program(counter=lp.CourierNode(Counter), waiter=lp.PyNode(lp.wait_for_stop))
        running = launch(program)
        client = running.client("counter")
        for _ in range(2):  # repeatedly
            try:
                getattr(client, method)()
            except courier.CourierError:
                break  # the program has stopped meanwhile
        result = running.wait()
        assert result.outcome is lp.Outcome.STOPPED
        assert result.exit_code == 0

    @pytest.mark.parametrize("where", ["constructor", "run"])
    def test_a_failing_node_ends_the_program_and_is_named(self, launch: Any, where: str) -> None:
        program = lp.Program("failure")
        program.add_node(lp.CourierNode(Counter), label="counter")
        program.add_node(lp.PyNode(lp.wait_for_stop), label="worker")
        program.add_node(lp.PyClassNode(FailingNode, where), label="worker")
        running = launch(program)
        with pytest.raises(lp.NodeFailedError) as failed:
            running.wait()
        assert failed.value.failure.node == "worker[1]"
        assert isinstance(failed.value.__cause__, ValueError)
        assert f"broken {where}" in str(failed.value)
        assert "contract.py" in str(failed.value)  # the traceback in the node
        assert running.running.result.exit_code != 0

    def test_who_ends_because_another_failed_is_not_seen_without_that(
        self, launch: Any, tmp_path: Path
    ) -> None:
        program = _program(
            waiter=lp.PyNode(lp.wait_for_stop),
            lingering=lp.PyNode(linger, str(tmp_path / "go")),
            failing=lp.PyClassNode(FailingNode, "run"),
        )
        running = launch(program, notice_s=60.0)

        def states() -> dict[str, str]:
            return {each.name: each.state for each in running.running.status()}

        def states_after_the_first_end() -> dict[str, str]:
            return found if (found := states())["waiter[0]"] == "ended" else {}

        seen = poll_until(states_after_the_first_end, timeout_s=30)
        assert (seen["failing[0]"], running.running.result) == ("failed", None)
        (tmp_path / "go").touch()
        with pytest.raises(lp.NodeFailedError):
            running.wait()
        assert states() == {"waiter[0]": "ended", "lingering[0]": "ended", "failing[0]": "failed"}

    def test_a_stubborn_node_is_ended_after_the_notice(self, launch: Any) -> None:
        program = _program(counter=lp.CourierNode(Counter), stubborn=lp.PyNode(run_for_ever))
        running = launch(program, notice_s=3.0)
        _wait_for_state(running, "stubborn[0]", "running")
        _wait_for_state(running, "counter[0]", "serving")
        result = running.stop(timeout_s=30)
        assert result.outcome is lp.Outcome.STOPPED
        assert result.killed == ("stubborn[0]",)

    def test_a_node_that_only_calls_others_ends_when_they_do(self, launch: Any) -> None:
        program = lp.Program("restless")
        counter = program.add_node(lp.CourierNode(Counter), label="counter")
        for _ in range(3):
            program.add_node(lp.PyNode(call_for_ever, counter), label="restless")
        running = launch(program, notice_s=60.0)
        poll_until(lambda: running.client("counter").increment() > 10)
        result = running.stop(timeout_s=30)
        assert result.outcome is lp.Outcome.STOPPED
        assert result.killed == ()

    def test_a_stop_handler_registered_during_the_stop_is_called(
        self, launch: Any, tmp_path: Path
    ) -> None:
        program = _program(late=lp.PyNode(register_late, str(tmp_path / "called")))
        running = launch(program, notice_s=30.0)
        _wait_for_state(running, "late[0]", "running")
        running.stop()
        assert (tmp_path / "called").exists()

    def test_a_node_that_fails_comes_back_as_its_policy_allows(self, launch: Any) -> None:
        program = _program(unsteady=lp.CourierNode(Unsteady))
        policy = lp.RestartPolicy(max_restarts=2, backoff_s=0.01)
        running = launch(program, restart={"unsteady": policy})
        client = running.client("unsteady")
        for attempt in range(3):
            assert call_until_answered(client.increment) == (1, attempt)
            _fail(client)
            if attempt < 2:
                _wait_for_restart(running, attempt + 1)
        with pytest.raises(lp.NodeFailedError, match=r"unsteady\[0\].*told to fail") as failed:
            running.wait()
        assert [restart.attempt for restart in failed.value.failure.restarts] == [1, 2]
        assert len(running.running.result.restarts) == 2

    def test_state_survives_restarts_and_launches(self, launch: Any, tmp_path: Path) -> None:
        policy = lp.RestartPolicy(backoff_s=0.01)
        for first in (1, 4):
            program = _program(unsteady=lp.CourierNode(Unsteady))
            checkpoints = {"unsteady": tmp_path / "kept"}
            running = launch(program, restart=policy, checkpoints=checkpoints, notice_s=30.0)
            client = running.client("unsteady")
            assert client.increment() == (first, 0)
            client.keep()
            _fail(client)
            _wait_for_restart(running, 1)
            assert call_until_answered(client.increment) == (first + 1, 1)
            assert client.increment() == (first + 2, 1)
            running.stop()

    def test_a_node_that_is_stuck_is_found_and_comes_back(self, launch: Any) -> None:
        program = _program(unsteady=lp.CourierNode(Unsteady))
        limits = lp.Liveness(health_s=5.0, heartbeat_s=6.0)
        policy = lp.RestartPolicy(backoff_s=0.01)
        running = launch(program, restart=policy, liveness={"unsteady": limits})
        client = running.client("unsteady")
        client.give("stuck")
        _wait_for_restart(running, 1)
        assert call_until_answered(client.increment) == (1, 1)
        (restart,) = running.stop().restarts
        assert "hung" in restart.failure.summary

    def test_callers_stop_before_those_they_call(self, launch: Any, tmp_path: Path) -> None:
        log, program, other = tmp_path / "log", lp.Program("parting"), None
        for name in ("last", "middle", "first"):
            node = lp.CourierNode(Parting, name, str(log), other)
            other = program.add_node(node, label=name)
        running = launch(program, notice_s=60.0)
        poll_until(lambda: log.exists() and log.read_text().count("is up") == 3, timeout_s=30)
        running.stop()
        expected = ["first is asked", "first leaves", "middle is asked", "middle leaves"]
        assert log.read_text().splitlines()[3:] == [*expected, "last is asked"]

    def test_status_names_nodes_and_where_they_listen(self, launch: Any) -> None:
        program = _program(counter=lp.CourierNode(Counter))
        running = launch(program)
        running.client("counter").increment()
        _wait_for_state(running, "counter[0]", "serving")
        (status,) = running.running.status()
        assert set(status.endpoints) == {"courier"}
        assert status.pid is not None

    def test_a_port_that_is_taken_is_a_clear_error(self, launch: Any) -> None:
        with courier.Server(Counter(), secret=courier.Secret.generate()) as server:
            node = lp.CourierNode(Counter, courier_kwargs={"port": server.port})
            program = _program(counter=node)
            with pytest.raises(lp.LaunchError, match=f"{server.port}.*taken"):
                launch(program)

    def test_launching_works_from_any_thread(self, launch: Any) -> None:
        program = lp.Program("thread")
        counter = program.add_node(lp.CourierNode(Counter), label="counter")
        program.add_node(lp.CourierNode(CallingNode, [counter], 2), label="caller")
        outcomes: list[lp.Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(launch(program).wait().outcome))
        thread.start()
        thread.join(60)
        assert outcomes == [lp.Outcome.COMPLETED]

    def test_nothing_but_the_log_folder_is_written(self, launch: Any, tmp_path: Any) -> None:
        program = lp.Program("files")
        counter = program.add_node(lp.CourierNode(Counter), label="counter")
        program.add_node(lp.CourierNode(CallingNode, [counter], 1), label="caller")
        here = set(tmp_path.iterdir())
        launch(program, log_dir=tmp_path / "logs").wait()
        assert set(tmp_path.iterdir()) - here <= {tmp_path / "logs"}


def _program(**nodes: lp.Node[Any]) -> lp.Program:
    """Returns a program with one node in each group."""
    program = lp.Program("contract")
    for label, node in nodes.items():
        program.add_node(node, label=label)
    return program


def _fail(client: Any) -> None:
    """Makes a node fail, which may be before it has answered."""
    with contextlib.suppress(courier.ServerLostError):
        client.give("fail")


def _wait_for_restart(running: Any, count: int) -> None:
    poll_until(lambda: running.running.status()[0].restarts >= count, timeout_s=30)


def _wait_for_state(running: Any, node: str, state: str) -> None:
    def reached() -> bool:
        return any(each.name == node and each.state == state for each in running.running.status())

    poll_until(reached, timeout_s=30)
