"""What every engine of real hosts must do, as tests to subclass.

class TestMyHosts(HostEngineContract):
    engine = "the name of a fixture that gives a desk"

Where a behaviour means something else for an engine, its class has a test of the same name.
"""

import contextlib
import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchpad_lite.testing import poll_until
from tests.launchers.host_engines import CHECKOUT, Command, Desk

#: Enough for restarts and calls that break meanwhile.
_CHECKPOINT_EVERY_S = 0.2

#: Whatever it says, the command line decides where it runs.
_ORIGINAL = """
    import socket
    import time
    import uuid
    import launchpad as lp

    class Names:
        def __init__(self):
            self._name = uuid.uuid4()

        def name(self):
            return self._name

    class Own(lp.CourierNode):
        def run(self):
            print("own run of", lp.context.get_context().launch_type.value, flush=True)
            super().run()

    class Asks:
        def __init__(self, others, address):
            self._others = others
            self._address = address

        def run(self):
            print(len({other.name() for other in self._others}), "are there", flush=True)
            host, _, port = self._address.resolve().rpartition(":")
            while True:
                try:
                    print(socket.create_connection((host, int(port)), 1).makefile().read(), flush=True)
                    return lp.stop()
                except OSError:
                    time.sleep(0.05)

    def listen(address):
        listening = socket.socket()
        listening.bind(("", lp.get_port_from_address(address.resolve())))
        listening.listen()
        listening.accept()[0].sendall(b"listens at its own port")

    program = lp.Program("original")
    address = lp.Address("own")
    listens = lp.PyNode(listen, address)
    listens.allocate_address(address)
    program.add_node(listens, label="listens")
    with program.group("names"):
        others = [program.add_node(Own(Names)) for _ in range(2)]
    program.add_node(lp.CourierNode(Asks, others, address), label="asks")
    lp.launch(program, launch_type=lp.LaunchType.LOCAL_MULTI_THREADING)
"""


def _fail(desk: Desk, harm: Callable[[Command], object]) -> tuple[Command, str, str]:
    """Harms `store[0]`, which must be named first; returns the run, its host, and the reason."""
    run = desk.begin()
    host = run.host("store[0]")
    run.strike()
    harm(run)  # calls of the others fail as well
    assert run.end() == 1
    node, where, summary = run.result["failures"][0]
    assert (node, where) == ("store[0]", host)
    return run, host, summary


class HostEngineContract:
    """Subclass it with the name of the fixture of an engine."""

    engine: str
    #: A launch that cannot be, and what its refusal says.
    refused: tuple[dict[str, Any], str]

    @pytest.fixture
    def desk(self, request: pytest.FixtureRequest) -> Desk:
        desk: Desk = request.getfixturevalue(self.engine)
        return desk

    @pytest.mark.bed
    def test_nodes_call_one_another_and_are_seen_from_the_launch_until_one_stops_all(
        self, desk: Desk
    ) -> None:
        run = desk.begin(how={"calls": desk.calls_nodes})
        told = [run.told(f"caller{index}") for index in range(2)]
        status = run.status()
        assert {each["there"] for each in told} == {run.host("store[0]")}
        assert [each["here"] for each in told] == [status[f"caller[{n}]"][1] for n in range(2)]
        assert len({host for _, host, *_ in status.values()}) == 3
        if desk.calls_nodes:
            run.until(f"^THE SCRIPT CALLED {run.host('store[0]')}$")
        # What is measured comes later.
        poll_until(lambda: all(cpu is not None for *_, cpu, _ in run.status().values()), 60)
        poll_until(lambda: all(mib for *_, mib in run.status().values()), 60)
        assert all(restarts == 0 and pid > 0 for _, _, restarts, pid, *_ in run.status().values())
        run.say("stop")
        run.check()
        assert (run.result["outcome"], run.result["failures"]) == ("STOPPED", [])
        for index, each in enumerate(told):
            line = f"{index} on {each['here']} called {each['there']}"
            for words in (line, f"a complaint of {index}"):
                assert run.said(rf"^\[caller\[{index}\]\] {words}$"), run.output
                assert words in desk.log(f"caller/{index}")
        assert "the store leaves" in desk.log("store/0")
        desk.assert_nothing_is_left()

    @pytest.mark.bed
    def test_an_example_runs_unchanged_from_the_command_line(self, desk: Desk) -> None:
        program = str(CHECKOUT / "examples" / "consumer_producers" / "program.py")
        output = desk.command_line(*desk.command_line_options, program).check(100)
        assert "total: 190" in output
        assert "Traceback" not in output
        desk.assert_nothing_is_left()

    @pytest.mark.bed
    def test_a_script_of_the_original_runs_without_a_change(self, desk: Desk) -> None:
        script = desk.write(textwrap.dedent(_ORIGINAL), "original.py")
        output = desk.command_line(*desk.command_line_options, "--compat", str(script)).check()
        assert "2 are there" in output
        assert "listens at its own port" in output
        assert output.count("own run of local_mp") == 2
        desk.assert_nothing_is_left()

    @pytest.mark.parametrize(
        ("signum", "codes"),
        [
            pytest.param(signal.SIGINT, {-2, 130}, marks=pytest.mark.bed),
            pytest.param(signal.SIGHUP, {-1, 129}, marks=pytest.mark.slow),
        ],
    )
    def test_a_signal_stops_callers_first(
        self, desk: Desk, signum: signal.Signals, codes: set[int]
    ) -> None:
        run = desk.begin()
        run.send(signum)
        assert run.end() in codes
        leaving = ["the caller leaves", "the caller leaves", "the store leaves"]
        assert run.notes() == leaving
        assert sorted(re.findall("the .* leaves", run.output)) == leaving
        assert len(re.findall(r"\d+ calls, 0 lost", run.output)) == 2
        desk.assert_nothing_is_left()

    @pytest.mark.slow
    def test_a_second_interrupt_does_not_wait_for_nodes(self, desk: Desk) -> None:
        run = desk.begin(how={"deaf": True}, notice_s=300)
        run.send(signal.SIGINT)
        poll_until(lambda: run.told("asked0") and run.told("asked1"), 60)
        run.send(signal.SIGINT)
        assert run.end(60) in (-2, 130)
        desk.assert_nothing_is_left()

    @pytest.mark.slow
    def test_who_does_not_end_within_the_notice_is_killed_and_named(self, desk: Desk) -> None:
        run = desk.begin(how={"deaf": True}, notice_s=3)
        run.send(signal.SIGTERM)
        assert run.end(60) in (-15, 143)
        assert run.result["killed"] == ["caller[0]", "caller[1]"]
        desk.assert_nothing_is_left()

    @pytest.mark.bed
    def test_a_killed_launcher_leaves_nothing(self, desk: Desk) -> None:
        run = desk.begin()
        run.strike()
        run.kill()
        desk.assert_nothing_is_left()

    @pytest.mark.bed
    def test_the_first_cause_is_named_with_its_host(self, desk: Desk) -> None:
        run, host, summary = _fail(desk, lambda run: desk.kill_worker(run, "store[0]"))
        assert re.search(desk.killed, summary)
        assert run.said(rf"store\[0\] on {host} failed: {desk.killed}")
        desk.assert_nothing_is_left()

    @pytest.mark.slow
    def test_an_exception_is_told_with_its_traceback_and_a_report(self, desk: Desk) -> None:
        run = desk.begin()
        host = run.host("caller[1]")
        run.say("fail1")
        assert run.end() == 1
        ((node, where, summary),) = run.result["failures"]
        assert (node, where) == ("caller[1]", host)
        assert re.fullmatch(r"(\S+\.)?Trouble: no data", summary)
        states = {"store[0]": "ended", "caller[0]": "ended", "caller[1]": "failed"}
        assert run.result["states"] == states
        assert run.said(r"^CAUSE Trouble\('no data'\) \(<class 'LookupError'>,\)$")
        assert run.said(r'script.py", line \d+, in work$')
        assert run.output.count("the caller leaves") == 1
        folder = Path(re.findall("^FOLDER (.*)$", run.output, re.MULTILINE)[0])
        assert "no data" in (folder / "report.txt").read_text()
        stacks = {each.name for each in (folder / "stacks").iterdir()}
        assert stacks >= {"store[0].txt", "caller[0].txt"}
        desk.assert_nothing_is_left()

    @pytest.mark.bed
    def test_a_killed_node_comes_back_at_its_address_with_its_state(self, desk: Desk) -> None:
        checkpoints = [str(desk.there / "state"), _CHECKPOINT_EVERY_S]
        options = {"restart": "on_failure", "checkpoints": checkpoints, "how": {"patient": True}}
        run = desk.begin(**options)
        host = run.host("store[0]")
        seen: set[Path] = set()

        def first_is_complete() -> bool:
            with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                seen.update((desk.shared / "state").rglob("0*/**/total"))
            return len(seen) > 1  # a second one is begun when the first is written

        poll_until(first_is_complete, 30)
        run.strike()
        desk.kill_worker(run, "store[0]")
        run.await_restart("store[0]", host)
        run.until(r"^\[store\[0\]\] restored \d+$")
        run.await_calls()
        run.finish()
        ((node, summary),) = run.result["restarts"]
        assert node == "store[0]"
        assert re.search(desk.killed, summary)

    @pytest.mark.slow
    def test_a_lost_host_is_told_and_nothing_of_the_program_goes_on(self, desk: Desk) -> None:
        run, host, summary = _fail(desk, lambda run: desk.lose_host(run.host("store[0]")))
        assert re.search(desk.lost, summary), summary
        assert run.output.count("NodeFailedError: ") == 1
        self.recover(desk, host)
        desk.assert_nothing_is_left()

    def recover(self, desk: Desk, host: str) -> None:
        """Does what an engine waits for until it takes a host that is lost for over."""

    @pytest.mark.bed
    def test_a_refusal_says_what_cannot_be_and_where(self, desk: Desk) -> None:
        options, words = self.refused
        refusal = desk.launch(**options).refusal()
        assert re.search(words, refusal), refusal
        desk.assert_nothing_is_left()


class DetachingContract(HostEngineContract):
    """For engines whose programs go on without the process that launched them."""

    @pytest.mark.bed
    def test_a_detached_program_is_looked_at_and_stopped_from_another_shell(
        self, desk: Desk
    ) -> None:
        script = desk.launch(
            'if __name__ == "__main__":\n'
            "    lp.launch(make_program(), LAUNCHER, detach=True, **OPTIONS).wait()\n"
            '    print("the script continues")\n'
        )
        assert "the script continues" in script.check()
        run = self.reference(script)

        def told(command: str) -> str:
            return desk.command_line(command, run).check()

        def all_run() -> bool:
            return len(re.findall(r" (running|serving) ", told("status"))) == 3

        poll_until(all_run, 90)
        status = told("status")
        assert re.search(r"^counting: running$", status, re.MULTILINE), status
        line = r"^store\[0\] +(running|serving) +[\d:]+ +\S+ +\d+ +0 "
        assert re.search(line, status, re.MULTILINE), status
        poll_until(lambda: "[caller[1]] 1 on " in told("logs"), 60)
        stack = r"^caller\[1\]\n  MainThread:\n.* in run\n"
        assert re.search(stack, told("stack"), re.MULTILINE | re.DOTALL)
        (desk.shared / "hold").touch()
        # Not all systems tell that it sleeps.
        both = r"caller\[0\]\.run, caller\[1\]\.run wait for store\[0\]\.add, which (waits|sleeps) "
        poll_until(lambda: re.search(both, told("why")), 60)
        (desk.shared / "hold").unlink()
        assert "counting: stopped, `stop` in another shell" in told("stop")
        desk.assert_nothing_is_left()

    def reference(self, script: Command) -> str:
        """How the run is called from outside."""
        raise NotImplementedError
