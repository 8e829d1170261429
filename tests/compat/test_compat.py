"""Programs as they are written for the original Launchpad, on threads and on processes."""

import concurrent.futures
import importlib
import inspect
import operator
import queue
import re
import socket
import socketserver
import sys
import textwrap
import threading
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from absl import flags

import courier
import launchpad as lp
from launchpad.launch import serialization, terminals, worker_manager
from launchpad.launch.test_multi_processing import launch as test_mp
from launchpad.launch.test_multi_threading import address_builder, launch as test_mt
from launchpad.nodes.courier import courier_utils
from launchpad.nodes.courier.node import CourierNode
from launchpad.nodes.python import local_multi_processing
from launchpad_lite.testing import poll_until

status: Any = importlib.import_module("pybind11_abseil.status")
TYPES = ("test_mt", "test_mp")


class Recorder:
    """Serves what it was told."""

    def __init__(self) -> None:
        self._told: list[Any] = []

    def tell(self, what: Any) -> None:
        self._told.append(what)

    def told(self) -> list[Any]:
        return self._told


@pytest.fixture(params=TYPES)
def launch_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def case() -> Iterator[unittest.TestCase]:
    """A test case as `test_case=` takes it; ends as one does."""
    test_case = unittest.TestCase()
    yield test_case
    test_case.doCleanups()


def run_as_test(function: Callable[[unittest.TestCase], None]) -> unittest.TestResult:
    """Runs a function as a method of a test case."""

    class Case(unittest.TestCase):
        def runTest(self) -> None:  # noqa: N802 - the name that unittest knows
            function(self)

    result = unittest.TestResult()
    Case().run(result)
    return result


def recorded(program: lp.Program) -> Any:
    """Adds a recorder; returns its node."""
    node = lp.CourierNode(Recorder)
    program.add_node(node, label="recorder")
    return node


def told(node: Any, count: int) -> list[Any]:
    """Waits until a recorder was told some things; returns them."""
    client = node.create_handle().dereference()
    poll_until(lambda: len(client.told()) >= count)
    return list(client.told())


class AsksContext:
    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def run(self) -> None:
        context = lp.context.get_context()
        self._recorder.tell(context.launch_type)
        self._recorder.tell(context.launch_type == context.launch_type.value)
        lp.wait_for_stop()


def test_a_node_knows_how_it_was_launched(launch_type: str, case: unittest.TestCase) -> None:
    program = lp.Program("context")
    recorder = recorded(program)
    with program.group("asks"):
        program.add_node(lp.CourierNode(AsksContext, recorder.create_handle()))
    lp.launch(program, launch_type=launch_type, test_case=case)
    assert told(recorder, 2) == [lp.LaunchType(launch_type), True]
    with pytest.raises(AssertionError, match="context"):
        lp.context.get_context()


class OwnRun(CourierNode):
    """Adds to what the node does."""

    def run(self) -> None:
        self._args[0].tell(["before", self._constructor.__name__, self._should_run])
        super().run()


class OwnServer(CourierNode):
    """Makes its own server, as the original's `run` does."""

    def run(self) -> None:
        instance = self._construct_instance()
        port = lp.get_port_from_address(self._address.resolve())
        server = courier_utils.make_courier_server(instance, port=port, **self._courier_kwargs)
        server.Start()
        lp.wait_for_stop()
        server.Stop()
        server.Join()


class Greets:
    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def greet(self) -> str:
        return "hello"


@pytest.mark.parametrize("kind", [OwnRun, OwnServer])
def test_a_subclass_of_courier_node_may_override_run(
    launch_type: str, kind: type[CourierNode], case: unittest.TestCase
) -> None:
    program = lp.Program("overrides")
    recorder = recorded(program)
    node = kind(Greets, recorder.create_handle(), courier_kwargs={"thread_pool_size": 2})
    program.add_node(node, label="greets")
    lp.launch(program, launch_type=launch_type, test_case=case)
    assert node.create_handle().dereference().greet() == "hello"
    if kind is OwnRun:
        assert told(recorder, 1) == [["before", "Greets", True]]


@pytest.mark.parametrize("kind", [CourierNode, lp.PyClassNode])
def test_whether_a_node_runs_its_object_is_known_before_the_launch(kind: Any) -> None:
    node = kind(Greets, None)
    assert node._should_run
    node.disable_run()
    assert not node._should_run


def fail() -> None:
    raise LookupError("nothing here")


def stay() -> None:
    lp.wait_for_stop()


def end() -> None:
    pass


def program_of(**groups: Any) -> lp.Program:
    program = lp.Program("functions")
    for label, function in groups.items():
        program.add_node(lp.PyNode(function), label=label)
    return program


@pytest.mark.parametrize(
    "options",
    [{}, {"labels_to_wait_for": ["fails"]}, {"return_on_first_completed": True}],
    ids=["all", "a group", "the first"],
)
def test_wait_raises_what_a_node_raised(launch_type: str, options: dict[str, Any]) -> None:
    manager = lp.launch(program_of(fails=fail, stays=stay), launch_type)
    error = LookupError if launch_type == "test_mt" else RuntimeError
    with pytest.raises(error, match="nothing here"):
        manager.wait(**options)
    worker_manager.end_tests()  # and nobody is told twice


class FailsLate:
    def run(self) -> None:
        lp.stop()
        lp.wait_for_stop()
        raise LookupError("too late")


def test_an_error_after_the_stop_is_told_and_does_not_count(
    launch_type: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    program = lp.Program("late")
    program.add_node(lp.CourierNode(FailsLate), label="late")
    manager = lp.launch(program, launch_type)
    manager.wait()
    output = b"".join(line for _, line in manager.running.output()).decode()
    assert "LookupError: too late" in caplog.text + capfd.readouterr().err + output


def test_one_can_wait_for_groups_for_the_first_and_for_the_stop(launch_type: str) -> None:
    manager = lp.launch(program_of(ends=end, stays=stay), launch_type)
    manager.wait(["ends"])
    manager.wait(return_on_first_completed=True)
    assert manager.running.result is None
    with pytest.raises(ValueError, match="no group 'other'"):
        manager.wait(["other"])
    manager.stop_and_wait()
    assert manager.running.result is not None


def test_a_failure_that_nobody_waits_for_fails_the_test(launch_type: str) -> None:
    def test(case: unittest.TestCase) -> None:
        lp.launch(program_of(fails=fail), launch_type, test_case=case).running.join()

    (error,) = run_as_test(test).errors
    assert "LookupError: nothing here" in error[1]


@pytest.mark.parametrize(
    "launch_type", ["test_mt", pytest.param("test_mp", marks=pytest.mark.slow)], indirect=True
)
def test_ten_programs_in_one_process(launch_type: str) -> None:
    def test(case: unittest.TestCase) -> None:
        program = lp.Program("one")
        recorder = recorded(program)
        launched.append(lp.launch(program, launch_type=launch_type))
        recorder.create_handle().dereference().tell(1)

    launched: list[worker_manager.WorkerManager] = []
    for _ in range(10):
        result = run_as_test(test)
        assert result.wasSuccessful(), result.errors
        assert launched[-1].running.result is not None


def test_the_flag_has_a_value_and_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = flags.FLAGS["lp_launch_type"]
    monkeypatch.setattr(flag, "value", flag.default)  # another test may have parsed a command line
    assert flags.FLAGS.lp_launch_type == lp.LAUNCH_TYPE.value == "local_mt"
    monkeypatch.setattr(flag, "value", "test_mt")
    manager = lp.launch(program_of(stays=stay))
    assert manager.running.ends_with_script
    worker_manager.end_tests()
    assert manager.running.result is not None


def test_threads_share_their_arguments_with_the_test() -> None:
    filled: list[int] = []
    program = lp.Program("shared")
    program.add_node(lp.PyNode(filled.append, 1), label="fills")
    lp.launch(program, "test_mt").wait()
    assert filled == [1]


def test_nodes_of_tests_must_be_fit_for_processes_unless_the_test_says_otherwise() -> None:
    done = threading.Event()
    program = lp.Program("event")
    program.add_node(lp.PyNode(done.set), label="sets")
    with pytest.raises(RuntimeError, match=r"sets\[0\].*serialize_py_nodes=False"):
        lp.launch(program, "test_mt")
    with pytest.raises(RuntimeError, match=r"sets\[0\]"):
        serialization.check_nodes_are_serializable("sets", program.groups["sets"])
    lp.launch(program, "test_mt", serialize_py_nodes=False).wait()
    assert done.is_set()


def test_mistakes_are_named_with_their_node(launch_type: str) -> None:
    program = lp.Program("mistakes")
    program.add_node(lp.CourierNode(Recorder, 1), label="one")
    program.add_node(lp.CourierNode(Recorder, 2), label="two")
    with pytest.raises(ValueError, match=r"(?s)one\[0\].*two\[0\].*too many"):
        lp.launch(program, launch_type)


def test_groups_that_do_not_exist_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    process = local_multi_processing.PythonProcess(env={"A": "1"})
    lp.launch(program_of(ends=end), "test_mp", local_resources={"actor": process}).wait()
    assert "local_resources['actor'] has no effect: the groups are ['ends']" in caplog.text
    with pytest.raises(ValueError, match="must be a PythonProcess"):
        lp.launch(program_of(ends=end), "test_mp", local_resources={"ends": {}})


def test_of_several_programs_the_first_runs(caplog: pytest.LogCaptureFixture) -> None:
    lp.launch([program_of(ends=end), program_of(fails=fail)], "test_mt").wait()
    assert "given 2 programs" in caplog.text


def test_launch_types_tell_what_is_local() -> None:
    assert lp.is_local_launch("local_mt")
    assert not lp.is_local_launch(lp.LaunchType.TEST_MULTI_THREADING)
    assert lp.is_local_launch_or_test("test_mp")


@pytest.mark.parametrize("kind", ["vertex_ai", "local_docker"])
def test_what_is_not_there_says_what_to_use(kind: str) -> None:
    assert not lp.is_local_launch_or_test(kind)
    lp.DockerConfig("code", "requirements.txt", hw_requirements=None, python_path=None)
    with pytest.raises(ValueError, match="kubernetes"):
        lp.launch(program_of(ends=end), kind)
    with pytest.raises(
        ValueError, match=r"'loca_mp' is not a valid LaunchType; known are local_mt, "
    ):
        lp.launch(program_of(ends=end), "loca_mp")


def test_what_is_for_another_system_is_named_in_a_warning(
    launch_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    lp.launch(program_of(ends=end), launch_type, xm_resources={"ends": 1}).wait()
    assert "xm_resources= and controller_xm_requirements= have no effect" in caplog.text


def test_a_stop_where_no_program_runs_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="no program runs"):
        lp.stop()
    with pytest.raises(RuntimeError, match="no program runs"):
        lp.wait_for_stop()


def test_terminals(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("DISPLAY", raising=False)
    with pytest.raises(
        ValueError, match="no terminal 'screen'; known are current_terminal, output_to"
    ):
        lp.launch(program_of(ends=end), "local_mp", terminal="screen")
    assert terminals.choose("output_to_files") == "output_to_files"
    for name in ("gnome-terminal", "gnome-terminal-tabs", "xterm", "tmux_session", "byobu_session"):
        monkeypatch.setenv(terminals.VARIABLE, name)
        assert terminals.choose(None) is None
        assert f"{name}: there is no" in caplog.text


def speak() -> None:
    print("a word")


def test_output_goes_where_the_original_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHPAD_LOGGING_DIR", str(tmp_path))
    program = program_of(first=speak, second=speak)
    lp.launch(program, "local_mp", terminal="output_to_files").wait()
    for label in ("first", "second"):
        assert (tmp_path / label / "0").read_text() == "a word\n"
    assert "a word" not in capfd.readouterr().out


def test_a_stopper_ends_the_program_in_its_nodes_and_outside(launch_type: str) -> None:
    program = lp.Program("stopper")
    stopper = lp.make_program_stopper(launch_type)
    program.add_node(lp.PyNode(stopper), label="stops")
    program.add_node(lp.PyNode(stay), label="stays")
    lp.launch(program, launch_type).wait()
    manager = lp.launch(program_of(stays=stay), launch_type)
    stopper()
    manager.wait()


def test_addresses() -> None:
    address = lp.Address("replay")
    with pytest.raises(RuntimeError, match="not known"):
        address.resolve()
    builder = lp.SimpleLocalAddressBuilder()
    address.bind(builder)
    assert address.resolve() == builder.build()
    node, other = lp.PyNode(end), lp.PyNode(end)
    node.allocate_address(address)
    node.allocate_address(address)
    assert list(node.addresses) == [address]
    with pytest.raises(ValueError, match="belongs to"):
        other.allocate_address(address)


def test_the_port_of_an_address_may_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LP_PORT_replay", "8000")
    assert lp.get_port_from_address("localhost:80") == 80
    assert lp.get_port_from_address("localhost:replay") == 8000
    with pytest.raises(ValueError, match="LP_PORT_other"):
        lp.get_port_from_address("localhost:other")


def listen_plainly(port: int) -> Callable[[], object]:
    listening = socket.socket()
    listening.bind(("", port))
    listening.listen()
    return listening.close


def listen_with_a_server_of_sockets(port: int) -> Callable[[], object]:
    return socketserver.TCPServer(
        ("localhost", port), socketserver.StreamRequestHandler
    ).server_close


def listen_with_grpc(port: int) -> Callable[[], object]:
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    assert server.add_insecure_port(f"[::]:{port}") == port
    server.start()
    return lambda: server.stop(None).wait()


def listen_with_courier(port: int) -> Callable[[], object]:
    server = courier.Server(port=port)
    server.Start()
    return server.Stop


LISTENERS = (listen_plainly, listen_with_a_server_of_sockets, listen_with_grpc, listen_with_courier)


class ListensTwice:
    """Fails once when it listens."""

    def __init__(self, listen: Any, address: lp.Address, recorder: Any) -> None:
        self._listen, self._address, self._recorder = listen, address, recorder

    def run(self) -> None:
        close = self._listen(lp.get_port_from_address(self._address.resolve()))
        try:
            self._recorder.tell(self._listen.__name__)
            if self._recorder.told().count(self._listen.__name__) < 2:
                raise LookupError("once")
            lp.wait_for_stop()
        finally:
            close()


@pytest.mark.parametrize("launcher", TYPES)
def test_a_node_listens_as_it_likes_at_an_address_of_its_own_also_when_it_is_restarted(
    launcher: str, launch_program: Any
) -> None:
    program = lp.Program("own")
    recorder = recorded(program)
    addresses = []
    for listen in LISTENERS:
        address = lp.Address("own")
        node = lp.PyClassNode(ListensTwice, listen, address, recorder.create_handle())
        program.add_node(node, label=listen.__name__)
        node.allocate_address(address)  # after the node was added, too
        addresses.append(address)
    running = launch_program(program, launcher, restart="on_failure")
    names = told(recorder, 2 * len(LISTENERS))
    assert sorted(names) == sorted(2 * [each.__name__ for each in LISTENERS])
    for address in addresses:
        host, _, port = address.resolve().rpartition(":")
        socket.create_connection((host, int(port)), 20).close()
    running.stop()


class StopsWhenCalled:
    def __init__(self) -> None:
        self._called = threading.Event()

    def call(self) -> str:
        self._called.set()
        return "called"

    def fail(self) -> None:
        self._called.set()
        raise ValueError("of the method")

    def run(self) -> None:
        self._called.wait()


class Calls:
    def __init__(self, other: Any, answers: list[str]) -> None:
        self._other, self._answers = other, answers

    def run(self) -> None:
        self._answers.append(self._other.call())
        lp.stop()
        assert lp.wait_for_stop()


def test_nodes_run_without_a_program_where_a_test_has_bound_their_addresses() -> None:
    server = lp.CourierNode(StopsWhenCalled)
    answers: list[str] = []
    caller = lp.CourierNode(Calls, server.create_handle(), answers)
    address_builder.bind_addresses([server, caller])
    thread = threading.Thread(target=server.run)
    thread.start()
    caller.run()
    thread.join()
    lp.MultiThreadingColocation([lp.PyNode(answers.append, "a"), lp.PyNode(end)]).run()
    assert answers == ["called", "a"]
    with pytest.raises(LookupError, match="nothing here"):
        lp.PyNode(fail).run()
    with pytest.raises(AssertionError, match="context"):
        lp.context.get_context()  # none of it is left in this thread


def test_a_failed_call_is_a_status_that_is_not_ok(case: unittest.TestCase) -> None:
    program = lp.Program("fails")
    handle = program.add_node(lp.CourierNode(StopsWhenCalled), label="server")
    test_mt.launch(program, case)
    with pytest.raises(status.StatusNotOk, match="of the method"):
        handle.dereference().fail()


def test_processes_are_launched_for_tests_by_a_function_of_their_own(
    case: unittest.TestCase,
) -> None:
    resources = {"ends": lp.PythonProcess(env={"A": "1"})}
    test_mp.launch(program_of(ends=end), case, resources).wait()


def test_a_period_for_checkpoints_needs_no_folder() -> None:
    with pytest.raises(ValueError, match="minutes"):
        lp.ReverbNode(list, checkpoint_time_delta_minutes=0)
    node = lp.ReverbNode(list, checkpoint_time_delta_minutes=5)
    assert node._work.checkpoint_ctor is not None
    assert lp.ReverbNode(list)._work.checkpoint_ctor is None


def test_tables_of_reverb_are_made_where_there_is_a_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: unittest.TestCase
) -> None:
    source = """
        class checkpointers:
            CheckpointerBase = object

        class Server:
            def __init__(self, tables, port, checkpointer):
                pass

            def localhost_client(self):
                pass

            def stop(self):
                pass
    """
    (tmp_path / "reverb.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reverb", raising=False)
    found: queue.SimpleQueue[lp.LaunchType] = queue.SimpleQueue()

    def make_tables() -> list[Any]:
        found.put(lp.context.get_context().launch_type)
        return []

    program = lp.Program("replay")
    program.add_node(lp.ReverbNode(make_tables), label="replay")
    lp.launch(program, "test_mt", test_case=case, serialize_py_nodes=False)
    assert found.get(timeout=5) is lp.LaunchType.TEST_MULTI_THREADING
    del sys.modules["reverb"]


def _table() -> list[tuple[str, list[str]]]:
    """Returns the names in the documentation, with their parameters."""
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([\w.]+)` \|(.*)\|$", page.partition("## What differs")[0], re.MULTILINE
    )
    return [(name, re.findall(r"`(.+?)`", parameters)) for name, parameters in rows]


@pytest.mark.parametrize(("name", "parameters"), _table())
def test_the_names_of_the_original_take_its_parameters(name: str, parameters: list[str]) -> None:
    found = inspect.signature(operator.attrgetter(name)(lp)).parameters
    given = [each for each in found if each != "self"]
    by_position = parameters[: parameters.index("*")] if "*" in parameters else parameters
    assert given[: len(by_position)] == by_position
    assert {*parameters} - {"*"} <= {*given}


def test_the_modules_of_the_original_are_there() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
    paragraph = page.partition("So are the modules")[2].partition("\n\n")[0]
    names = re.findall(r"`((?:courier|launchpad)?\.[\w.]+)`", paragraph)
    assert len(names) > 15
    for name in names:
        importlib.import_module(f"launchpad{name}" if name.startswith(".") else name)
    for name in ("LaunchType", "LAUNCH_TYPE", "CourierClient", "nodes", "flags"):
        assert hasattr(lp, name)
    for name in ("stop_event", "wait_for_stop", "register_stop_handler", "unregister_stop_handler"):
        assert getattr(worker_manager, name) is getattr(lp, name)
