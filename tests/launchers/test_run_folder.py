"""Output and reports go to a folder of this user's own, whoever was there first."""

import contextlib
import fcntl
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.slurm._folder import WORK, RunFolder
from launchers.supervision.logs import NodeLogs
from launchers.supervision.run_folder import make_run_folder
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Outcome, ProgramResult
from launchpad_lite.launching.crash import write_crash_report
from launchpad_lite.parts.log_file import FollowedLogs
from tests.launchers.running import program_of


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which everybody may write to."""
    for name in ("LAUNCHPAD_LOGGING_DIR", "LAUNCHPAD_KEEP_RUNS", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_run_has_a_folder_of_its_own_for_this_user_only(temporary: Path) -> None:
    folder = make_run_folder("demo")
    assert folder != make_run_folder("demo")
    assert folder.parent.parent == temporary
    for each in (folder, folder.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_a_folder_of_the_users_own_comes_before_the_one_for_temporary_files(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_run_folder("demo").parent.parent == temporary
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert make_run_folder("demo").parent == tmp_path / "launchpad_lite"


def _make_old_run(base: Path, number: int, name: str = "") -> Path:
    """Makes the folder of a run of two days ago, with a log."""
    folder = base / (name or f"demo-20200101-{number:06}-abcdef")
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "0.log").write_text("said")
    for path in (folder / "actor" / "0.log", folder / "actor", folder):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    return folder


def test_the_oldest_runs_go_where_nobody_has_named_the_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, launch_program: Any
) -> None:
    monkeypatch.setenv("LAUNCHPAD_KEEP_RUNS", "3")
    base = make_run_folder("demo").parent
    used, *old = [_make_old_run(base, number) for number in range(6)]
    launch_program(program_of(node=lp.PyNode(lp.wait_for_stop)), "test_mp", log_dir=used)
    for each in (used / "actor", used):
        os.utime(each, (0, 0))  # it has said nothing for long
    changed = old[1]
    (changed / "actor" / "1.log").touch()
    target = _make_old_run(base.parent, 7)
    link = base / "demo-20200101-000000-aaaaaa"
    link.symlink_to(target)
    foreign = _make_old_run(base, 0, "not-a-run")
    new = make_run_folder("demo")
    assert [each for each in old if not each.exists()] == [old[0], old[2], old[3]]
    for kept in (used, link, target / "actor" / "0.log", foreign, new):
        assert kept.exists(), kept


def test_no_run_goes_while_it_is_not_known_what_runs(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHPAD_KEEP_RUNS", "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    old = _make_old_run(make_run_folder("demo").parent, 1)
    (tmp_path / "launchpad_lite").mkdir(mode=0o700)
    with (tmp_path / "launchpad_lite" / "1-abcdef01.json").open("w") as entry:
        entry.write(f'{{"log_dir": "{old}", "new": 1}}')  # of another version
        entry.flush()
        fcntl.flock(entry, fcntl.LOCK_EX)
        make_run_folder("demo")
        assert old.exists()
    make_run_folder("demo")
    assert not old.exists()


def test_no_run_goes_below_a_folder_that_the_user_has_named(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHPAD_KEEP_RUNS", "1")
    monkeypatch.setenv("LAUNCHPAD_LOGGING_DIR", str(temporary / "mine"))
    old = [_make_old_run(temporary / "mine", number) for number in range(3)]
    make_run_folder("demo")
    make_run_folder("demo", temporary / "mine" / "named")
    assert all(each.exists() for each in old)


@pytest.mark.parametrize("number", ["0", "-1", "many", "1.5"])
def test_a_number_of_runs_that_cannot_be_is_refused(
    number: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHPAD_KEEP_RUNS", number)
    with pytest.raises(LaunchError, match="LAUNCHPAD_KEEP_RUNS"):
        make_run_folder("demo")


def _give_away(base: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives files to others: needs root")
    os.chown(base, 4711, -1)


def _open_to_the_group(base: Path) -> None:
    base.chmod(0o770)


def _replace_by_a_link(base: Path) -> None:
    base.rename(base.with_name("elsewhere"))
    base.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [_give_away, _open_to_the_group, _replace_by_a_link])
def test_the_folder_that_everybody_knows_is_refused_unless_it_is_ours(
    spoil: Callable[[Path], None], temporary: Path
) -> None:
    folder = make_run_folder("demo")
    spoil(folder.parent)
    with pytest.raises(LaunchError) as refused:
        make_run_folder("demo")
    for part in (str(folder.parent), "of user", "Remove", "LAUNCHPAD_LOGGING_DIR", "log_dir="):
        assert part in str(refused.value)


@pytest.mark.parametrize("is_named_by", ["variable", "argument"])
def test_a_named_folder_is_refused_where_everybody_may_replace_it(
    is_named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    tmp_path.chmod(0o777)
    named = tmp_path / "logs"
    monkeypatch.setenv("LAUNCHPAD_LOGGING_DIR", str(named))
    with pytest.raises(LaunchError, match="others could replace"):
        make_run_folder("demo", named if is_named_by == "argument" else None)


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may write everywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_reports_do_not_go_where_a_link_leads(tmp_path: Path, precious: Path) -> None:
    program = program_of(node=lp.PyNode(print))
    others = tmp_path / "others"
    others.mkdir()
    precious.rename(others / "precious.txt")
    (tmp_path / "stacks").symlink_to(others)
    with pytest.raises(PermissionError, match=r"stacks: others could replace"):
        write_crash_report(tmp_path, lp.plan(program), ProgramResult(Outcome.FAILED), {})
    assert [each.name for each in others.iterdir()] == ["precious.txt"]


def test_a_named_folder_is_refused_where_its_user_may_not_write() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o555)
        with _as_nobody(), pytest.raises(LaunchError, match=f"may not write to it: '{folder}'"):
            make_run_folder("p", Path(folder))


def test_a_slurm_job_is_neither_written_nor_read_where_everybody_may_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    run = RunFolder(tmp_path / "run")
    run.write_submission({WORK: b""})
    run.check_owner()
    tmp_path.chmod(0o777)
    for refused in (run.check_owner, lambda: run.write_submission({})):
        with pytest.raises(LaunchError, match="others could replace"):
            refused()
    assert (run.path / "run").is_dir(), "a refusal takes nothing from the run that is there"


def test_a_job_that_begins_keeps_what_is_just_being_written_of_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "slurm")
    run.write_submission({})
    run.write("result", "of the run before")
    aside = run.path / "run" / ".stop-1"
    aside.touch()  # the launching process is about to rename it
    run.begin("7")
    assert aside.exists()
    assert (run.read("job", str), run.read("result", str)) == ("7", None)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of ours that somebody wants changed."""
    file = tmp_path / "precious"
    file.write_text("mine")
    return file


def test_a_log_is_no_link(tmp_path: Path, precious: Path) -> None:
    logs = NodeLogs(tmp_path, ["greeter[0]"], math.inf)
    log = tmp_path / "greeter" / "0.log"
    log.unlink()
    log.symlink_to(precious)
    logs.write("greeter[0]", b"output")
    assert precious.read_text() == "mine"
    with pytest.raises(LaunchError, match=r"cannot write logs: .*0\.log"):
        NodeLogs(tmp_path, ["greeter[0]"], math.inf)


def test_reports_take_the_place_of_links(tmp_path: Path, precious: Path) -> None:
    plan = lp.plan(program_of(node=lp.PyNode(print)))
    (tmp_path / "report.txt").symlink_to(precious)
    for _ in range(2):  # also where an earlier run was
        write_crash_report(tmp_path, plan, ProgramResult(Outcome.FAILED), {"node[0]": "here"})
    assert precious.read_text() == "mine"
    assert (tmp_path / "stacks" / "node[0].txt").read_text() == "here"
    for name in ("report", "plan", "versions", "stacks/node[0]"):
        assert (tmp_path / f"{name}.txt").lstat().st_mode == stat.S_IFREG | 0o600


@pytest.mark.parametrize("often", [True, False])
def test_a_log_is_followed_into_its_next_file_and_what_it_had_no_room_for_is_told(
    tmp_path: Path, often: bool
) -> None:
    logs = NodeLogs(tmp_path, ["greeter[0]"], 3000)
    follower = FollowedLogs(tmp_path)
    read = [*follower.read()]
    for number in range(1000):
        logs.write("greeter[0]", b"line %d\n" % number)
        if often and number % 50 == 0:
            read += follower.read()
    read += follower.read(is_last=True)
    assert {node for node, _ in read} == {"greeter[0]"}
    lines = b"".join(data for _, data in read).decode().splitlines()
    missed = [line for line in lines if "lines were not shown" in line]
    assert len(missed) == (0 if often else 1)
    if often:
        assert lines == [f"line {number}" for number in range(1000)]
    assert lines[-1] == "line 999"
