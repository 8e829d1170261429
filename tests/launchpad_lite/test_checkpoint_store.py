"""The store of checkpoints: they are there whole or not at all, whatever happens meanwhile."""

import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from launchpad_lite.errors import CheckpointError, LaunchpadError
from launchpad_lite.testing import poll_until
from launchpad_lite.worker import checkpoints
from launchpad_lite.worker.checkpoints import CheckpointStore

Environment = dict[str, str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "learner" / "0"


@pytest.fixture
def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, keep=2)


def writes(text: str) -> Callable[[Path], object]:
    """What a node's `save` may look like."""

    def write(state: Path) -> None:
        (state / "nested").mkdir()
        (state / "nested" / "step.txt").write_text(text)
        (state / "weights.bin").write_bytes(bytes(1000))

    return write


def restored(store: CheckpointStore) -> str | None:
    """Restores what `writes` wrote."""
    texts: list[str] = []
    found = store.restore(lambda state: texts.append((state / "nested" / "step.txt").read_text()))
    assert (found is None) == (texts == [])
    return texts[0] if texts else None


def numbers(store: CheckpointStore) -> list[int]:
    return [int(path.name) for path in store.versions()]


def hidden(folder: Path) -> list[str]:
    """Temporary folders, as they are seen from outside."""
    return sorted(path.name for path in folder.iterdir() if path.name[0] == "." and path.is_dir())


# Saving and restoring.


def test_what_is_saved_is_restored(store: CheckpointStore, folder: Path) -> None:
    weights = os.urandom((2 << 20) + 7)  # more than one block

    def write(state: Path) -> None:
        assert list(state.iterdir()) == []
        (state / "a" / "b").mkdir(parents=True)
        (state / "empty").mkdir()
        (state / "a" / "b" / "weights.bin").write_bytes(weights)
        (state / "nothing").touch()
        (state / "名前 \n").write_text("odd names are names")
        (state / os.fsdecode(b"\xff")).write_text("no UTF-8")
        (state / "latest").symlink_to("a/b/weights.bin")
        (state / "a" / "up").symlink_to("../empty")

    saved = store.save(write)
    found: list[str] = []

    def read(state: Path) -> None:
        found.extend(str(path.relative_to(state)) for path in state.rglob("*"))
        assert (state / "latest").read_bytes() == weights
        assert (state / "a" / "up").resolve() == (state / "empty").resolve()

    assert store.restore(read) == saved
    assert sorted(found) == sorted([
        "a", "a/b", "a/b/weights.bin", "a/up", "empty", "latest", "nothing", "名前 \n", "\udcff",
    ])  # fmt: skip
    assert saved.is_relative_to(folder)


def test_nothing_is_made_before_the_first_save_which_may_be_empty(
    store: CheckpointStore, tmp_path: Path
) -> None:
    assert store.restore(lambda state: pytest.fail("there is nothing")) is None
    store.discard_incomplete()
    assert store.versions() == []
    assert list(tmp_path.iterdir()) == []
    assert store.save(lambda state: None) == store.restore(lambda state: None)


def test_checkpoints_are_for_their_user_only(store: CheckpointStore, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        state = store.save(writes("1"))
    finally:
        os.umask(before)
    for place in (state, *state.parents):
        if place == tmp_path:
            break
        assert stat.S_IMODE(place.stat().st_mode) == 0o700, place
    assert stat.S_IMODE((state.parent.parent / ".lock").stat().st_mode) == 0o600


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: needs root")


@needs_root
def test_what_another_user_has_put_there_is_neither_restored_nor_removed(
    store: CheckpointStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(writes("planted"))
    leftover = folder / ".launchpad-checkpoint-left"
    leftover.mkdir()
    folder.parent.parent.chmod(0o2775)  # a group shares what the user has named
    assert restored(store) == "planted"
    leftover.mkdir()
    os.chown(folder, 4711, -1)
    told = rf"{folder}: .* cannot be trusted: .*of user 4711.*: chown -R root {folder}"
    with pytest.raises(CheckpointError, match=told):
        restored(store)
    with pytest.raises(CheckpointError, match="of user 4711"):
        store.save(writes("2"))
    store.discard_incomplete()
    assert "of user 4711" in caplog.text
    assert (numbers(store), leftover.is_dir()) == ([1], True)


def test_versions_are_numbers_and_go_on_after_gaps(store: CheckpointStore, folder: Path) -> None:
    store.save(writes("1"))
    store.versions()[0].rename(folder / "99999999")
    store.save(writes("2"))
    assert numbers(store) == [99_999_999, 100_000_000]
    assert restored(store) == "2"
    store.save(writes("3"))
    assert numbers(store) == [100_000_000, 100_000_001]
    assert restored(store) == "3"


def test_other_things_in_the_folder_are_left_alone(
    store: CheckpointStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    for name in ("notes", "7", "000000xx", ".launchpad", ".git"):
        (folder / name).mkdir()
    (folder / "00000005").write_text("a file with a name of ours")
    (folder / ".launchpad-checkpoint-file").touch()
    (folder / ".launchpad-checkpoint-link").symlink_to("notes")
    before = set(folder.iterdir())
    for step in range(4):
        store.save(writes(str(step)))
    store.discard_incomplete()
    assert set(folder.iterdir()) - before == {
        folder / ".lock", folder / "00000008", folder / "00000009",
    }  # fmt: skip
    assert before <= set(folder.iterdir())
    assert caplog.records == []


def test_each_file_and_folder_is_synced_once(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(writes("1"))
    synced: list[int] = []
    fsync = os.fsync

    def counting_fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counting_fsync)
    version = store.save(writes("2")).parent
    wanted = [version.parent, version, *version.rglob("*")]
    assert sorted(synced) == sorted(path.stat().st_ino for path in wanted)


# Damage.


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def rewrite_manifest(version: Path, **changes: Any) -> None:
    path = version / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def loop_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda v: (v / "manifest.json").unlink(), "has no manifest"),
    "no JSON": (lambda v: (v / "manifest.json").write_bytes(b"\xff\0{"), "manifest is damaged"),
    "deep JSON": (
        lambda v: (v / "manifest.json").write_text("[" * 100_000), "manifest is damaged",
    ),
    "no entries": (lambda v: (v / "manifest.json").write_text('{"format": 1}'), "is damaged"),
    "odd entries": (lambda v: rewrite_manifest(v, entries={"a": 1}), "manifest is damaged"),
    "newer format": (lambda v: rewrite_manifest(v, format=2), "has the format 2"),
    "manifest is a folder": (
        lambda v: replace_by_folder(v / "manifest.json"), "manifest cannot be read",
    ),
    "missing file": (lambda v: (v / "state/weights.bin").unlink(), "'weights.bin' is missing"),
    "missing state": (lambda v: shutil.rmtree(v / "state"), "cannot be read"),
    "truncated file": (
        lambda v: os.truncate(v / "state/weights.bin", 999),
        "'weights.bin' is a file of 999 bytes, and was a file of 1000 bytes",
    ),
    "one bit": (lambda v: change(v / "state/weights.bin"), "content of 'weights.bin' has changed"),
    "extra file": (lambda v: (v / "state/nested/x").touch(), "'nested/x' was added"),
    "file is a folder": (
        lambda v: replace_by_folder(v / "state/weights.bin"), "'weights.bin' is a folder",
    ),
    "file of another user": (
        lambda v: os.chown(v / "state/weights.bin", 4711, -1), "'weights.bin' belongs to user 4711",
    ),
    "file is a link": (lambda v: loop_link(v / "state/weights.bin"), "'weights.bin' is a link"),
}  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [pytest.param(each, marks=needs_root if "another user" in each else ()) for each in DAMAGES],
)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    damage: str, store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(writes("older"))
    version = store.save(writes("newer")).parent
    spoil, text = DAMAGES[damage]
    spoil(version)
    assert restored(store) == "older"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "launchpad_lite.worker.checkpoints"
    assert record.getMessage().startswith(f"{version}: skipped this checkpoint: ")
    assert text in record.getMessage()
    assert version.is_dir(), "it is kept for whoever wants to look"
    store.save(writes("newest"))
    assert restored(store) == "newest"


def test_checkpoints_that_are_all_damaged_are_an_error_that_names_them(
    store: CheckpointStore, folder: Path
) -> None:
    older, newer = (store.save(writes(text)).parent for text in ("older", "newer"))
    change(older / "state/weights.bin")
    (newer / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="remove these folders") as caught:
        restored(store)
    assert str(caught.value).startswith(f"{folder}: all checkpoints are damaged. ")
    assert f"{newer}: it has no manifest; {older}: the content of" in str(caught.value)
    for version in (older, newer):
        shutil.rmtree(version)
    assert restored(store) is None


def test_an_error_of_restore_names_the_checkpoint_and_what_to_do(store: CheckpointStore) -> None:
    store.save(writes("1"))
    version = store.save(writes("2")).parent

    def read(state: Path) -> None:
        raise KeyError("momentum")

    with pytest.raises(
        CheckpointError, match=r"KeyError.*'momentum'.*remove this folder"
    ) as caught:
        store.restore(read)
    assert str(caught.value).startswith(str(version))
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value, LaunchpadError)
    shutil.rmtree(version)
    assert restored(store) == "1"


# Saves that fail.


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (lambda state: os.mkfifo(state / "x"), "'x' is no file, folder or link"),
    "a link to elsewhere": (lambda state: (state / "x").symlink_to("/etc"), "the link 'x' leads"),
    "an absolute link": (lambda state: (state / "x").symlink_to(state), "make the link relative"),
    "a link to the one before": (
        lambda state: (state / "x").symlink_to("../../00000001/state"), "the link 'x' leads",
    ),
    "a detour": (
        lambda state: [(state / "a").symlink_to("."), (state / "x").symlink_to("a/../../..")],
        "the link 'x' leads",
    ),
    "no folder": (lambda state: state.rmdir(), "removed or replaced the folder"),
    "a file": (lambda state: [state.rmdir(), state.touch()], "removed or replaced the folder"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_checkpoint_cannot_hold_is_refused(
    what: str, store: CheckpointStore, folder: Path
) -> None:
    store.save(writes("1"))
    write, text = REFUSED[what]
    with pytest.raises(CheckpointError, match=text) as caught:
        store.save(write)
    assert str(folder) in str(caught.value)
    assert hidden(folder) == []
    assert restored(store) == "1"


def test_a_file_that_is_still_written_to_is_refused(
    store: CheckpointStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = checkpoints._listing

    def slow_listing(state: Path) -> Any:
        entries = listing(state)
        with (state / "weights.bin").open("ab") as file:
            file.write(b"late")
        return entries

    monkeypatch.setattr(checkpoints, "_listing", slow_listing)
    with pytest.raises(CheckpointError, match=r"weights.bin: changed from 1000 to 1004 bytes"):
        store.save(writes("1"))
    assert hidden(folder) == []


def test_a_folder_that_cannot_be_one_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "learner" / "0"
    store = CheckpointStore(folder, keep=1)
    with pytest.raises(CheckpointError, match=rf"{folder}: .*a folder that works"):
        store.save(writes("1"))
    with pytest.raises(CheckpointError, match="restored"):
        store.restore(lambda state: None)
    store.discard_incomplete()


@pytest.mark.parametrize("inner", ["save", "restore"])
def test_a_hook_that_saves_or_restores_is_told_and_does_not_hang(
    inner: str, store: CheckpointStore
) -> None:
    store.save(writes("1"))
    with pytest.raises(CheckpointError, match="cannot save or restore checkpoints themselves"):
        store.save(lambda state: getattr(store, inner)(print))
    with pytest.raises(CheckpointError, match="cannot save or restore checkpoints themselves"):
        store.restore(lambda state: getattr(store, inner)(print))
    store.save(writes("2"))
    assert restored(store) == "2"


# Other processes.

_PRELUDE = """
import contextlib, os, resource, shutil, sys
from pathlib import Path
from launchpad_lite.worker.checkpoints import CheckpointStore
from launchpad_lite.errors import CheckpointError

folder = Path(sys.argv[1])
"""


def script_command(script: str, folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", _PRELUDE + script, str(folder), *arguments]


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[[list[str]], "subprocess.Popen[str]"]]:
    """Starts commands, with pipes; they are over after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str]) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


_SAVER = """
moment, text = sys.argv[2:]


def block(*_):
    print("ready", flush=True)
    sys.stdin.read()


def write(state):
    (state / "nested").mkdir()
    (state / "nested" / "step.txt").write_text(text)
    if moment == "write":
        block()
    (state / "weights.bin").write_bytes(bytes(1000))


if moment == "rename":
    Path.rename = block
if moment == "remove":
    shutil.rmtree = block
CheckpointStore(folder, 2).save(write)
"""

StartSaver = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start_saver(folder: Path, start: Any) -> StartSaver:
    """Starts a process that saves "other", and returns when it stands still at a moment."""

    def start_saver(moment: str) -> "subprocess.Popen[str]":
        saver: subprocess.Popen[str] = start(script_command(_SAVER, folder, moment, "other"))
        assert read_line(saver) == "ready\n"
        return saver

    return start_saver


@pytest.mark.parametrize(
    ("moment", "tidy", "newest"),
    [
        ("write", "discard", "2"),
        ("rename", "save", "2"),
        ("rename", "restore", "2"),
        ("remove", "restore", "other"),
    ],
)
def test_a_save_that_is_killed_leaves_whole_checkpoints_and_is_tidied_up(
    moment: str,
    tidy: str,
    newest: str,
    store: CheckpointStore,
    folder: Path,
    start_saver: StartSaver,
) -> None:
    store.save(writes("1"))
    store.save(writes("2"))
    saver = start_saver(moment)
    saver.send_signal(signal.SIGKILL)
    saver.wait()
    assert len(hidden(folder)) == 1
    if tidy == "discard":
        store.discard_incomplete()
    elif tidy == "save":
        store.save(writes("3"))
    if tidy != "save":
        assert restored(store) == newest
    assert hidden(folder) == []
    store.save(writes("4"))
    assert restored(store) == "4"


def test_the_save_of_a_live_process_is_not_discarded_but_waited_for(
    store: CheckpointStore, folder: Path, start_saver: StartSaver, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(writes("1"))
    saver = start_saver("write")
    (temporary,) = hidden(folder)
    store.discard_incomplete()
    assert hidden(folder) == [temporary]
    assert caplog.records == []
    waiting = threading.Thread(target=store.save, args=(writes("3"),))
    waiting.start()
    poll_until(lambda: "waiting for another process" in caplog.text)
    assert str(folder) in caplog.text
    store.discard_incomplete()
    assert hidden(folder) == [temporary]
    _, _ = saver.communicate("")
    waiting.join()
    assert saver.returncode == 0
    assert numbers(store) == [2, 3]
    assert hidden(folder) == []
    assert restored(store) == "3"
    shutil.rmtree(store.versions()[-1])
    assert restored(store) == "other"


def test_a_child_that_is_forked_during_a_save_does_not_keep_the_folder(
    store: CheckpointStore, start: Any, folder: Path
) -> None:
    # In a process of its own: this one may have threads, which do not like forks.
    script = """
children = []


def write(state):
    pid = os.fork()
    if pid == 0:
        sys.stdin.read()
        os._exit(0)
    children.append(pid)


CheckpointStore(folder, 2).save(write)
CheckpointStore(folder, 2).save(lambda state: print("saved again"))
os.kill(children[0], 9)
os.waitpid(children[0], 0)
"""
    process = start(script_command(script, folder))
    assert read_line(process) == "saved again\n"
    assert process.wait(60) == 0
    assert numbers(store) == [1, 2]


def test_saves_of_threads_come_one_after_the_other(store: CheckpointStore) -> None:
    inside: list[int] = []

    def write(state: Path) -> None:
        inside.append(1)
        assert len(inside) == 1
        writes("x")(state)
        inside.pop()

    threads = [threading.Thread(target=store.save, args=(write,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(store) == [7, 8]
    assert restored(store) == "x"


# Disks and permissions.


def run_with(
    prefix: list[str], script: str, folder: Path, environment: Environment
) -> "subprocess.CompletedProcess[str]":
    """Runs a script under a command that takes rights or gives a disk; skips where it may not."""
    probe = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        assert os.environ.get("CI") != "true", f"CI checks this: {prefix}: {probe.stderr}"
        pytest.skip(f"{prefix[0]} is not permitted here: {probe.stderr}")
    command = [*prefix, *script_command(script, folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_full_disk_is_an_error_that_says_so_and_leaves_the_older_checkpoint(
    folder: Path, environment: Environment
) -> None:
    script = """
store = CheckpointStore(folder, 2)
state = store.save(lambda state: (state / "x").write_text("older"))


def fill(state):
    with (state / "big").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def fill_quietly(state):
    with contextlib.suppress(OSError):
        fill(state)


for write, error, text in (
    (fill, OSError, "No space left"),
    (fill_quietly, CheckpointError, "Free some space there"),
    (fill_quietly, CheckpointError, str(folder)),
):
    try:
        store.save(write)
    except error as raised:
        assert type(raised) is error, raised
        assert text in str(raised), raised
    else:
        raise AssertionError("saved")
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "00000001"]
    assert store.restore(lambda state: print((state / "x").read_text())) == state
store.save(lambda state: (state / "x").write_text("newer"))
store.restore(lambda state: print((state / "x").read_text()))
"""
    folder.mkdir(parents=True)
    prefix = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    )
    mount = 'mount -t tmpfs -o size=1m,mode=700 none "$0" && exec "$@"'
    done = run_with([*prefix, "sh", "-c", mount, str(folder)], script, folder, environment)
    assert (done.stdout.split(), done.stderr) == (["older", "older", "older", "newer"], "")
    assert list(folder.iterdir()) == [], "the small disk went with its process"


#: Root may do all: it keeps its name, and loses its rights.
_WITHOUT_RIGHTS = (
    ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else ["env"]
)


def run_without_rights(
    script: str, folder: Path, environment: Environment, mode: int = 0o700
) -> "subprocess.CompletedProcess[str]":
    """Runs a script while the folder has a mode."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    try:
        return run_with(_WITHOUT_RIGHTS, script, folder, environment)
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize(
    ("mode", "with_lock", "found"),
    [(0o500, True, "1"), (0o500, False, "1"), (0o000, True, "PermissionError")],
    ids=["read-only", "read-only without a lock", "unreadable"],
)
def test_from_a_folder_without_rights_is_restored_what_can_be_and_saving_says_what_to_do(
    mode: int, with_lock: bool, found: str, store: CheckpointStore, folder: Path,
    environment: Environment,
) -> None:  # fmt: skip
    script = """
for store in (CheckpointStore(folder, 2), CheckpointStore(folder / "new", 2)):
    try:
        store.save(print)
    except CheckpointError as error:
        assert isinstance(error.__cause__, PermissionError)
        assert str(folder) in str(error)
        assert "Make it writable for this user" in str(error)
    else:
        raise AssertionError("saved")
store = CheckpointStore(folder, 2)
store.discard_incomplete()
try:
    store.restore(lambda state: print((state / "nested" / "step.txt").read_text()))
except CheckpointError as error:  # not a fresh start
    print(type(error.__cause__).__name__)
"""
    store.save(writes("1"))
    if not with_lock:
        (folder / ".lock").unlink()
    done = run_without_rights(script, folder, environment, mode)
    assert done.stdout == f"{found}\n", done.stderr
    assert ("cannot be tidied up" in done.stderr) == (mode == 0)
    assert numbers(store) == [1]


def test_states_with_read_only_folders_are_saved_and_removed(
    folder: Path, environment: Environment
) -> None:
    script = """
store = CheckpointStore(folder, 1)


def write(state):
    (state / "a" / "b").mkdir(parents=True)
    (state / "a" / "b" / "x").touch(mode=0o400)
    (state / "a" / "b").chmod(0o500)
    (state / "a").chmod(0o500)
    state.chmod(0o500)


for _ in range(3):
    store.save(write)
try:
    store.save(lambda state: [write(state), 1 / 0])
except ZeroDivisionError:
    print(*sorted(path.name for path in folder.iterdir()))
"""
    done = run_without_rights(script, folder, environment)
    assert (done.stdout, done.stderr) == (".lock 00000003\n", "")


# All of it together.

ERRORS = (KeyError("x"), OSError(28, "full"), SystemExit(3), StopIteration())
_STEPS = st.lists(
    st.sampled_from(["save", "save", "fail", "change newest", "truncate newest", "kill"]),
    max_size=12,
)


@settings(max_examples=30)
@given(steps=_STEPS, keep=st.integers(1, 3))
def test_whatever_happens_the_newest_intact_state_is_restored(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], keep: int
) -> None:
    folder = tmp_path_factory.mktemp("property")
    store = CheckpointStore(folder, keep)
    # What each version holds; None if its content was changed, missing if also its size was.
    states: dict[int, str | None] = {}
    short: set[int] = set()

    def fail(state: Path) -> None:
        writes("failed")(state)
        raise error

    for number, step in enumerate(steps):
        error = ERRORS[number % len(ERRORS)]
        if step == "save":
            version = max([0, *states, *short]) + 1
            assert store.save(writes(str(number))).parent.name == f"{version:08}"
            states[version] = str(number)
            for surplus in sorted(states)[:-keep]:
                del states[surplus]
        elif step == "fail":
            with pytest.raises(type(error)) as caught:
                store.save(fail)
            assert caught.value is error
        elif step == "kill":
            left = folder / f"{checkpoints._TEMPORARY}{number}" / "state"
            left.mkdir(parents=True)
            writes("half")(left)
        elif versions := store.versions():
            weights = versions[-1] / "state" / "weights.bin"
            newest = int(versions[-1].name)
            if step == "truncate newest":
                os.truncate(weights, 10)
                states.pop(newest, None)
                short.add(newest)
            else:
                # Twice the same change would be none.
                weights.write_bytes(bytes([number + 1]) * weights.stat().st_size)
                if newest in states:
                    states[newest] = None
        intact = [states[version] for version in sorted(states) if states[version] is not None]
        if intact or not store.versions():
            assert restored(store) == (intact[-1] if intact else None)
        else:
            with pytest.raises(CheckpointError, match="all checkpoints are damaged"):
                restored(store)
        assert hidden(folder) == []
        assert numbers(store) == sorted({*states, *short})
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_state_of_a_gigabyte_is_saved_without_being_loaded(
    folder: Path, environment: Environment
) -> None:
    script = """
def write(state):
    with (state / "big").open("wb") as file:
        for _ in range(1024):
            file.write(bytes(1 << 20))


def peak_mib():
    # Of what is resident, in KiB on Linux and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (10 if sys.platform == "linux" else 20)


store = CheckpointStore(folder, 1)
before = peak_mib()
store.save(write)
assert store.restore(lambda state: None)
assert peak_mib() - before < 64, peak_mib() - before
"""
    command = script_command(script, folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    shutil.rmtree(folder)
    assert (done.returncode, done.stderr) == (0, "")
