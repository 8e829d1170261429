"""What nodes find around them in their processes."""

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.testing import poll_until
from tests.launchers.running import program_of
from tests.launchers.scripts import Script, without_logs_line

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_LOOK_AROUND = """
    import json, os, pathlib, random, sys
    import beside
    import launchpad_lite as lp

    state = "changed by nobody"

    def look(index):
        seen = {
            "path": sys.path, "cwd": os.getcwd(), "argv": sys.argv, "state": state,
            "variable": os.environ.get("A_VARIABLE"), "random": random.random(),
            "stdin": sys.stdin.read(), "hash": hash("text"), "beside": beside.VALUE,
        }
        pathlib.Path(f"seen{index}.json").write_text(json.dumps(seen))

    state = "of the script"
    os.environ["A_VARIABLE"] = "set by the script"
    sys.path.append("/a/folder")
    pathlib.Path("launcher.json").write_text(
        json.dumps({"path": sys.path, "hash": hash("text"), "cwd": os.getcwd()})
    )
    program = lp.Program("environment")
    with program.group("look"):
        for index in range(2):
            program.add_node(lp.PyNode(look, index))
    lp.launch(program)
"""


def test_nodes_see_what_the_script_sees(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    with Script(tmp_path, _LOOK_AROUND) as script:
        ended = script.run("--option", cwd=elsewhere, env={"PYTHONHASHSEED": "5"})
        assert ended.code == 0, ended.stderr
    launcher = json.loads((elsewhere / "launcher.json").read_text())
    first, second = (json.loads((elsewhere / f"seen{i}.json").read_text()) for i in range(2))
    assert first["path"] == launcher["path"]
    assert first["cwd"] == str(elsewhere)
    assert first["argv"] == [str(script.path), "--option"]
    assert first["state"] == "of the script"
    assert first["variable"] == "set by the script"
    assert first["stdin"] == ""
    assert first["hash"] == second["hash"] == launcher["hash"]
    assert first["beside"] == 7
    assert first["random"] != second["random"]


@pytest.mark.parametrize("name", ["launchers", "json.py", "agent.py"])
def test_names_in_the_working_directory_hide_nothing(tmp_path: Path, name: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    path = here / name
    if path.suffix:
        path.write_text("raise SystemExit('the wrong module')\n")
    else:
        path.mkdir()
        (path / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    source = """
        import launchpad_lite as lp

        program = lp.Program("names")
        program.add_node(lp.PyNode(print, "hello"), label="node")
        lp.launch(program)
    """
    with Script(tmp_path, source) as script:
        ended = script.run(cwd=here)
        assert (ended.code, without_logs_line(ended.stderr)) == (0, "")
        assert ended.stdout == "[node[0]] hello\n"


class Descriptors:
    def count(self) -> list[str]:
        found = []
        for fd in Path("/proc/self/fd").iterdir():
            try:
                found.append(str(fd.readlink()))
            except OSError:
                continue
        return found


def _descriptors_of_last(launch_program: Any, nodes: int) -> list[str]:
    program = lp.Program("descriptors")
    with program.group("node"):
        for _ in range(nodes):
            program.add_node(lp.CourierNode(Descriptors))
    running = launch_program(program, "test_mp")
    found: list[str] = running.client("node", nodes - 1).count()
    running.stop()
    return found


def test_what_python_prints_as_it_starts_is_no_answer_of_the_agent(
    launch_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('a module of the site was loaded')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = lp.Program("printing")
    with program.group("node"):
        program.add_node(lp.PyNode(print, "hello"))
    assert launch_program(program, "test_mp").wait().outcome is lp.Outcome.COMPLETED


def _log_to_site(folder: Path) -> None:
    with contextlib.ExitStack() as files:
        for number in range(9):  # which get the first numbers that are free
            files.enter_context((folder / f"mine{number}").open("w"))
        logging.getLogger("site").warning("from the node")


def test_what_the_site_opens_as_python_starts_is_open_in_nodes(
    launch_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import logging", f"handler = logging.FileHandler({str(tmp_path / 'site.log')!r})"]
    (tmp_path / "sitecustomize.py").write_text(
        "\n".join([*lines, "logging.getLogger('site').addHandler(handler)"])
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = program_of("logging", node=lp.PyNode(_log_to_site, tmp_path))
    assert launch_program(program, "test_mp").wait().outcome is lp.Outcome.COMPLETED
    assert (tmp_path / "site.log").read_text() == "from the node\n"


_WITHOUT_STREAMS = """
    import pathlib
    import launchpad_lite as lp

    def note(fails):
        print("printed")
        pathlib.Path("noted").write_text("done")
        if fails:
            raise ValueError

    def make_program():
        program = lp.Program("service")
        with program.group("node"):
            program.add_node(lp.PyNode(note, {fails}))
        return program

    {last}
"""


@pytest.mark.parametrize(
    ("last", "fails"), [("lp.main(make_program)", False), ("lp.launch(make_program())", True)]
)
def test_a_script_needs_no_standard_streams(tmp_path: Path, last: str, fails: bool) -> None:
    with Script(tmp_path, _WITHOUT_STREAMS.format(last=last, fails=fails)) as script:
        closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
        ended = script.run(command=[*closed, sys.executable, str(script.path)])
        assert ended.code == fails
        assert (tmp_path / "noted").read_text() == "done"


@pytest.mark.slow
def test_a_worker_inherits_no_descriptors_of_others(launch_program: Any) -> None:
    alone = _descriptors_of_last(launch_program, 1)
    among_many = _descriptors_of_last(launch_program, 20)
    # grpc has a few more or less, by the number of cores it got hold of.
    pipes_and_logs = [
        [each for each in all_ if each.startswith(("pipe:", "/"))] for all_ in (alone, among_many)
    ]
    assert len(pipes_and_logs[0]) == len(pipes_and_logs[1])
    assert abs(len(alone) - len(among_many)) <= 3


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_the_launcher_keeps_no_descriptors(launch_program: Any) -> None:
    def launch_once() -> int:
        launch_program(program_of(node=lp.PyNode(print, "hello")), "test_mp").wait()
        return _open_descriptors()

    before = launch_once()
    for _ in range(20):
        launch_once()
    poll_until(lambda: _open_descriptors() <= before)
