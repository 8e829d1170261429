"""`python -m launchpad_lite.launch`: run, plan, render, and how mistakes are told."""

import os
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

import courier
import launchpad_lite as lp
from launchpad_lite.worker.checkpoints import CheckpointStore
from tests.launchers.scripts import without_logs_line

#: What `python -m launchpad_lite.launch` runs.
_SCRIPT = str(Path(lp.__file__).with_name("launch.py"))

PROGRAM = """
from pathlib import Path
from typing import Optional
import launchpad_lite as lp
from helper_beside import greeting

class Greeter:
    def __init__(self, text, times):
        self.text, self.times = text, times

    def run(self):
        print(self.text * self.times)

    def save(self, folder):
        pass

    restore = save

def make_program(times: int = 1, text="hello ", loud: bool = False, folder: Optional[Path] = None):
    program = lp.Program("greetings")
    text = text.upper() if loud else text
    program.add_node(lp.PyClassNode(Greeter, text, times), label="greeter")
    return program

def fail():
    raise ValueError("the first cause")

def failing():
    program = lp.Program("failing")
    program.add_node(lp.PyNode(fail), label="bad")
    return program

def wrong():
    program = lp.Program("wrong")
    program.add_node(lp.CourierNode(Greeter, lp.CourierNode(Greeter).create_handle(), 1), label="a")
    return program

def taken(port: int):
    program = lp.Program("taken")
    program.add_node(lp.CourierNode(Greeter, "", 1, courier_kwargs={"port": port}), label="a")
    return program

def nothing():
    return 5

def typed(count: Optional[int] = None, flag: Optional[bool] = None, names: list = (),
          sizes: tuple[int, ...] = (), ports: Optional[dict] = None):
    program = lp.Program("typed")
    program.add_node(lp.PyNode(print), label=f"{count!r} {flag!r} {names!r} {sizes!r} {ports!r}".translate({91: 60, 93: 62}))
    return program

ready = make_program()
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "dir"
    folder.mkdir()
    (folder / "helper_beside.py").write_text("greeting = 'hi'\n")
    (folder / "prog.py").write_text(PROGRAM)
    return folder


Command = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def command(programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Command:
    """Runs command lines in this process; returns exit code, output and errors."""
    monkeypatch.setattr(sys, "path", [str(programs), *sys.path])
    monkeypatch.chdir(programs)
    for name in ("prog", "helper_beside", "json_like"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["launch", *arguments])
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            runpy.run_path(_SCRIPT, run_name="__main__")
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return command


@pytest.mark.usefixtures("programs")
def test_a_program_in_a_file_is_run(run_command: Any) -> None:
    done = run_command("dir/prog.py:make_program", "--times=2", "--loud", "--text=ho ")
    assert (done.returncode, without_logs_line(done.stderr)) == (0, "")
    assert "HO HO" in done.stdout


@pytest.mark.parametrize("launcher", ["--launcher=local_mt", "--lp_launch_type=test_mt"])
def test_run_is_a_command_too_and_flags_stand_anywhere(command: Command, launcher: str) -> None:
    assert command("run", "prog.py", launcher) == (0, "hello \n", "")


def test_a_failing_node_gives_exit_code_1_and_the_cause(command: Command) -> None:
    code, _, told = command("--launcher=local_mt", "prog.py:failing")
    assert code == 1
    assert "bad[0]" in told
    assert "ValueError: the first cause" in told
    assert told.count("the first cause") < 4  # told once, with its traceback


def test_restarts_and_checkpoints_are_chosen_by_flags(command: Command, programs: Path) -> None:
    flags = ("--lp_restart=greeter=on_failure", "--lp_checkpoints=runs/1")
    code, shown, told = command("plan", *flags, "prog.py:ready")
    assert (code, told) == (0, "")
    assert "greetings  (local_mp: processes of this machine)" in shown
    assert "greeter[0]  PyClassNode(Greeter)" in shown
    promised = "each restart=on_failure, at most 3 in 600 s; checkpoints every {} s in {}"
    assert promised.format(60, programs / "runs/1") in shown
    _, shown, _ = command("plan", *flags, "--lp_checkpoint_period_secs=5", "prog.py:ready")
    assert promised.format(5, programs / "runs/1") in shown
    _, shown, _ = command("plan", *flags, "--lp_checkpoint_period_secs=0", "prog.py:ready")
    assert "checkpoints in" in shown
    code, _, told = command("plan", "--lp_checkpoint_period_secs=5", "prog.py:ready")
    assert code == 1
    assert "--lp_checkpoints=FOLDER, which is missing" in told
    code, _, told = command("plan", "--lp_restart=sometimes", "prog.py:ready")
    assert code == 2
    assert "restart: a restart policy is one of 'never', 'on_failure', 'always'" in told


def test_an_older_checkpoint_is_restored_by_its_name(command: Command, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "greeter" / "0", keep=2)
    for number in range(2):
        store.save(lambda folder, number=number: (folder / "n").write_text(str(number)))
    old, new = store.versions()
    code, out, err = command("restore", str(old))
    assert (code, err) == (0, "")
    assert (
        out == f"{new.with_name('00000003')} is the newest checkpoint now, a copy of {old.name}\n"
    )
    texts: list[str] = []
    store.restore(lambda folder: texts.append((folder / "n").read_text()))
    assert texts == ["0"]
    assert [each.name for each in store.versions()] == ["00000001", "00000002", "00000003"]
    code, _, err = command("restore", str(old.with_name("00000009")))
    assert code == 2
    assert "00000009: it is not there. There are: 00000001, 00000002, 00000003" in err
    assert len(store.versions()) == 3
    assert command("restore", str(tmp_path / "none" / "0" / "00000001"))[0] == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_what_stands_before_a_program_may_be_options_of_its_launcher(
    run_command: Any, tmp_path: Path, programs: Path
) -> None:
    options = ("--launcher=slurm", "--time=1:00:00", "--requeue", "--nodes=1")
    done = run_command(*options, "emit", "dir/prog.py", "--times=2", "--output=review")
    assert (done.returncode, done.stderr) == (0, "")
    script = (tmp_path / "review" / "job.sh").read_text()
    assert "#SBATCH --time=1:00:00\n" in script
    assert "#SBATCH --requeue\n" in script
    assert (tmp_path / "review").stat().st_mode & 0o777 == 0o700
    written = [Path(line) for line in done.stdout.splitlines()]
    assert tmp_path / "review" / "work.pickle" in written
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}
    # The launcher may be a word, too.
    done = run_command("emit", "slurm", "--nodes=1", "dir/prog.py", "-o", "again")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "again" / "job.sh").exists()


def test_nothing_is_emitted_to_where_others_could_replace_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    code, _, told = command("emit", "slurm", "--nodes=1", "prog.py:ready", "-o", "../open/review")
    assert code == 1
    assert "open: others could replace" in told
    assert "--output=" in told


_LAUNCHES_WHEN_IMPORTED = """
import launchpad_lite as lp

def make_program():
    program = lp.Program("again")
    program.add_node(lp.PyNode(make_program), label="a")
    return program

lp.launch(make_program(), "local_mp")
"""


@pytest.mark.parametrize(
    ("verb", "text", "line"),
    [
        ("plan", _LAUNCHES_WHEN_IMPORTED, 9),
        ("run", _LAUNCHES_WHEN_IMPORTED, 9),
        ("plan", "from launchpad_lite.search import Executor\nExecutor(workers=1)\n", 2),
    ],
)
def test_a_module_that_launches_when_it_is_imported_starts_nothing(
    command: Command, programs: Path, verb: str, text: str, line: int
) -> None:
    (programs / "json_like.py").write_text(text)
    code, shown, told = command(verb, "json_like.py")
    assert (code, shown) == (1, "")
    assert f"json_like.py:{line}: the script is imported by" in told
    assert "cannot launch the program once more" in told
    assert 'if __name__ == "__main__":' in told


def test_a_worker_that_imports_a_module_launches_nothing(run_script: Any, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(_LAUNCHES_WHEN_IMPORTED)
    done = run_script("import again")
    assert done.returncode == 1
    assert "a[0] on localhost failed" in done.stderr
    assert "the script is imported by a[0]" in done.stderr


def test_a_launcher_that_hands_out_nothing_emits_nothing(command: Command) -> None:
    code, _, told = command("emit", "prog.py:ready", "--output=review")
    assert code == 1
    assert "'local_mp' hands nothing to others" in told


def test_a_module_is_found_in_the_current_folder(run_command: Any, tmp_path: Path) -> None:
    source = PROGRAM.replace("from helper_beside import greeting\n", "")
    (tmp_path / "module_here.py").write_text(source)
    done = run_command("render", "module_here:make_program")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("flowchart LR")


def test_drawings_go_to_files(command: Command, programs: Path) -> None:
    assert command("render", "--output=graph.mmd", "prog:ready") == (0, "", "")
    assert (programs / "graph.mmd").read_text().startswith("flowchart LR")
    if shutil.which("dot") is not None or os.environ.get("CI") == "true":
        assert command("render", "prog.py:ready", "--output=graph.svg") == (0, "", "")
        ET.fromstring((programs / "graph.svg").read_text())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_module:make"], "cannot import 'no_such_module'"),
        (["no/such/file.py:make"], "no file 'no/such/file.py'"),
        (["json.py:loads"], "cannot be imported: the module 'json'"),
        (["raising:make"], "importing 'raising' failed: ZeroDivisionError"),
        (["missing_import"], "No module named 'not_installed_at_all'"),
        (["prog:no_such_function"], "it has: make_program, fail, failing, wrong, taken, nothing"),
        (["prog:nothing"], "returned 5 instead of an lp.Program"),
        (["prog:taken"], "missing a required argument: 'port'"),
        (["prog", "--tmies=2"], "(did you mean --times?); make_program takes --times, --text, -"),
        (["prog", "extra"], "unknown argument 'extra'"),
        (["--launcher=slurm", "--tiem=1", "prog"], "takes, before PROGRAM or RUN: --nodes, "),
        (["status", "--launcher=slurm", "--tiem=1", "17"], "(did you mean --time?); status takes"),
        (["--launcher=slurm", "--tiem=1", "--compat", "none.py"], "(did you mean --time?)"),
        (["prog", "--times=two"], "'--times=two': expected int"),
        (["prog", "--loud=maybe"], "expected true or false"),
        (["prog:wrong"], "never added"),
        (["prog", "--launcher=nonsense"], "Installed: kubernetes, local_mp, local_mt"),
        (["--lp_termination_notice_secs=soon", "prog"], "lp_termination_notice_secs"),
        (["plan"], "no PROGRAM is named"),
        (["render", "prog:ready", "--output=graph.png"], "name a file that ends in .svg or .mmd"),
        (["emit", "--launcher=slurm", "prog:ready"], "--output=FOLDER"),
        (["--launcher=slurm", "--nodes=0", "prog"], "--launcher=slurm: nodes is a number"),
        (["--launcher=slurm", "--nodes=many", "prog"], "'--nodes=many': expected int"),
        (["--launcher=kubernetes", "--work=/mnt", "prog"], "WorkStore, which only a script can"),
        (["--launcher=ssh", "--placement=h1", "prog"], "'--placement=h1': expected JSON like"),
    ],
)
def test_mistakes_on_the_command_line_give_exit_code_2(
    command: Command, programs: Path, arguments: list[str], words: str
) -> None:
    (programs / "json.py").write_text("")
    (programs / "raising.py").write_text("1 / 0\n")
    (programs / "missing_import.py").write_text("import not_installed_at_all\n")
    code, _, told = command(*arguments)
    assert code == 2
    assert words in told


def test_a_program_that_cannot_be_started_gives_exit_code_1(command: Command) -> None:
    with courier.Server(object()) as server:
        code, _, told = command("--launcher=local_mt", "prog:taken", f"--port={server.port}")
    assert code == 1
    assert str(server.port) in told


def test_without_arguments_and_with_help_the_usage_is_shown(command: Command) -> None:
    assert command()[0] == 2
    code, shown, _ = command("--help")
    assert code == 0
    assert "local_mp, local_mt" in shown


def test_arguments_are_converted_to_optional_types_too(command: Command) -> None:
    code, shown, _ = command("plan", "prog:typed", "--count=3", "--flag=false")
    assert code == 0
    assert "3 False ()" in shown
    lists = ("--names=a 'b c'", "--sizes=1 2", '--ports={"a": 1}')
    code, shown, _ = command("plan", "prog:typed", *lists)
    assert code == 0
    assert "None None <'a', 'b c'> (1, 2) {'a': 1}" in shown


def test_options_of_launchers_that_are_lists_and_mappings_have_a_form(
    command: Command, programs: Path
) -> None:
    options = ("--ssh=ssh -F 'my config'", '--placement={"greeter": "h2"}')
    code, _, told = command("emit", "ssh", "--hosts=h1,h2", *options, "prog.py:ready", "-o", "out")
    assert (code, told) == (0, "")
    commands = (programs / "out" / "commands.sh").read_text()
    assert commands.count("\nssh -F 'my config' ") == 2
    assert "# h2: greeter[0]\n" in commands


@pytest.mark.parametrize(
    "statement", ["from launchpad_lite import launch", "import launchpad_lite.launch"]
)
def test_importing_the_module_launch_does_not_replace_the_function(
    run_script: Any, statement: str
) -> None:
    done = run_script(
        f"{statement}\nimport launchpad_lite as lp\n"
        "assert lp.launch.__name__ == 'launch' and callable(lp.launch)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


_MAIN = """
import launchpad_lite as lp
from absl import flags
flags.DEFINE_string("greeting", "hello", "What it says.")

def greet(times):
    print(flags.FLAGS.greeting * times)

def make_program(times: int = 1, loud: bool = False):
    '''Greets.'''
    program = lp.Program("greetings")
    program.add_node(lp.PyNode(greet, times), label="greeter")
    return program

if __name__ == "__main__":
    lp.main(make_program)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--launcher=local_mt", "--times", "2", "--greeting=hi"], 0, "hihi\n"),
        (["--times=3", "plan"], 0, "greeter[0]  PyNode(greet)"),
        (["--loud", "plan"], 0, "greeter[0]  PyNode(greet)"),
        (["plan", "--json"], 0, '{"format": 1, "program": "greetings", "launcher": "local_mp"'),
        (["--help"], 0, "run, plan, render, emit, status, logs"),
        (["--version"], 0, lp.__version__),
        (["--laucher=local_mt"], 2, "'--laucher=local_mt' (did you mean --launcher?)"),
        (["more"], 2, "unknown argument 'more'; make_program takes --times"),
        (["--times"], 2, "'--times' needs a value: --times=VALUE"),
        (["--launcher=ssh", "--hosts=h1", "--cache=-rf"], 1, "--launcher=ssh: cache is a command"),
        (["logs", "--help"], 0, "--lp_checkpoint_period_secs=60.0"),
        (["logs", "greeter"], 1, "Logs of programs that have ended: "),
    ],
)
def test_a_script_gets_a_whole_command_line_in_one_line(
    run_script: Any, arguments: list[str], code: int, words: str
) -> None:
    done = run_script(_MAIN, *arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("by", ["script", "module"])
def test_help_tells_what_a_program_takes_and_runs_nothing(
    run_script: Any, run_command: Any, by: str
) -> None:
    done = run_script(_MAIN, "--help")
    if by == "module":
        done = run_command("script.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("Greets.", "--times=1 (int)", "--greeting=hello", "What it says.", "--launcher="):
        assert words in done.stdout
    assert "hello\n" not in done.stdout.replace("--greeting=hello\n", "")


def test_a_script_passes_arguments_of_launch_on(run_script: Any) -> None:
    passing = _MAIN.replace("lp.main(make_program)", "lp.main(make_program, RESTART='on_failure')")
    done = run_script(passing.replace("RESTART", "restart"), "plan")
    assert "restart=on_failure" in done.stdout
    done = run_script(passing.replace("RESTART", "restart"), "plan", "--lp_restart=always")
    assert (done.returncode, done.stderr) == (0, "")
    assert "restart=always" in done.stdout
    done = run_script(passing.replace("RESTART", "restrat"))
    assert "TypeError: lp.main: unknown option restrat=; known are" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "script.py"], "restart=on_failure"),
        (["plan", "--lp_restart=always", "script:make_program", "--times=3"], "restart=always"),
        (["--launcher", "local_mt", "script.py", "--greeting=hi"], "hi\n"),
        (["--launcher=local_mt", "script.py", "--greeting", "run"], "run\n"),
        (["plan", "other.py"], "restart=on_failure"),
        (["emit", "slurm", "--nodes=1", "script.py", "-o", "review"], "review/job.sh"),
    ],
)
def test_what_a_script_gives_lp_main_holds_however_it_is_named(
    run_command: Any, tmp_path: Path, arguments: list[str], words: str
) -> None:
    given = "lp.main(make_program, restart={'greeter': 'on_' + 'failure'})"
    (tmp_path / "script.py").write_text(_MAIN.replace("lp.main(make_program)", given))
    (tmp_path / "library.py").write_text(_MAIN)
    (tmp_path / "other.py").write_text(
        f"import launchpad_lite as lp\nfrom library import make_program\nif __name__ == '__main__': {given}"
    )
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_a_reader_that_has_read_enough_is_no_error(environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m launchpad_lite.launch --help | :"
    done = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("", "")


_PLAIN = """
import launchpad_lite as lp
program = lp.Program("plain")
program.add_node(lp.PyNode(print, "it ran"), label="a")
lp.launch(program, "local_mt").wait()
"""


@pytest.mark.parametrize(
    ("first", "argument", "code", "words"),
    [
        ("", "--laucher=local_mp", 1, "'--laucher=local_mp'; did you mean --launcher?"),
        ("", "--help", 0, "--launcher="),
        ("", "--own", 0, "it ran"),
        ("import argparse", "--host=a", 0, "it ran"),
        ("from argparse import ArgumentParser as P", "--host=a", 0, "it ran"),
        ("import unittest", "--laucher=local_mp", 1, "did you mean --launcher?"),
    ],
)
def test_flags_that_a_plain_script_does_not_know(
    run_script: Any, first: str, argument: str, code: int, words: str
) -> None:
    done = run_script(first + _PLAIN, argument)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr
    assert ("it ran" in done.stdout) == (words == "it ran")


def test_the_folder_of_logs_is_chosen_by_a_flag(run_script: Any, tmp_path: Path) -> None:
    done = run_script(_PLAIN.replace("local_mt", "test_mp"), "--lp_log_dir=mine")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "a" / "0.log").read_text() == "it ran\n"
