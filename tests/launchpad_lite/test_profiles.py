"""Profiles of running nodes, and their pictures."""

import json
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import launchpad_lite as lp
from launchpad_lite.cli._run_commands import AskOptions, ask
from launchpad_lite.launching import flame_graph
from launchpad_lite.launching.registry import Inspector
from launchpad_lite.testing import poll_until


class Busy:
    def run(self) -> None:
        threading.Thread(target=self.wait, name="waiter", daemon=True).start()
        print("ready", flush=True)
        while not lp.wait_for_stop(0):
            self.compute()

    def wait(self) -> None:
        lp.wait_for_stop(60)

    def compute(self) -> None:
        for _ in range(10**5):
            pass


def test_a_profile_tells_threads_that_compute_from_those_that_wait(tmp_path: Path) -> None:
    program = lp.Program("busy")
    program.add_node(lp.PyClassNode(Busy), label="busy")
    output = tmp_path / "busy.txt"
    text, stacks = "", list[list[str]]()

    def has_computed() -> bool:
        nonlocal text, stacks
        text = running.profile("busy[0]", 0.3, output)
        stacks = [line.rpartition(" ")[0].split(";") for line in output.read_text().splitlines()]
        begins = {tuple(each[:3]) for each in stacks if "compute (test_profiles.py:" in each[-1]}
        return ("busy[0]", "computes", "MainThread") in begins

    with lp.launch(program, "test_mp") as running:
        poll_until(lambda: list(running.output()))
        poll_until(has_computed)  # others may have the processor for 0.3 s
        with pytest.raises(ValueError, match=r"ends in \.svg, \.html"):
            running.profile("busy[0]", 0.1, tmp_path / "busy.png")
        with pytest.raises(lp.LaunchError, match=r"busy\[1\] has no profile: it does not answer"):
            running.profile("busy[1]", 0.1)
        for command, name in (("profile", "no/a.svg"), ("trace", "no/a.json")):
            options = AskOptions(seconds=0.1, output=str(tmp_path / name))
            with pytest.raises(lp.LaunchError, match=r"cannot write .*no.a\..*another --output="):
                ask(command, Inspector(running), None, [], options)
        running.request_stop("enough")
    assert "a thread that needs the interpreter lock waits" in text
    assert {each[1] for each in stacks if each[2] == "waiter"} == {"waits"}


_PROFILE = {
    "seconds": 1.0,
    "samples": 10,
    "lock_s": [0.001, 0.005],
    "places": [["run", "/a/<b>.py", 3, "user"], ["courier", "", 0, "ours"]],
    "stacks": [["computes", "T&;\n\x1b", [0], 6], ["waits", "T", [0, 1], 4]],
}


def test_pictures_of_profiles_hold_no_markup_of_nodes() -> None:
    profiles = {"a[0]": _PROFILE}
    picture = ET.fromstring(flame_graph.flame_graph(profiles))
    titles = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert "run (<b>.py:3): 6 samples, 60.0 %" in titles
    assert "T&;??: 6 samples, 60.0 %" in titles
    assert "(courier): 4 samples, 40.0 %" in titles
    assert flame_graph.folded(profiles) == (
        "a[0];computes;T&, \x1b;run (<b>.py:3) 6\na[0];waits;T;run (<b>.py:3);(courier) 4\n"
    )
    found = json.loads(flame_graph.speedscope(profiles))
    assert found["shared"]["frames"][0] == {"name": "run", "file": "/a/<b>.py", "line": 3}
    second = found["profiles"][1]
    assert (second["name"], second["samples"], second["weights"]) == (
        "a[0] T: waits",
        [[0, 1]],
        [4],
    )
