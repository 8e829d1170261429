import contextlib
import dataclasses
import io
import os
import shutil
import stat
import sys
import tarfile
import threading
import time
import types
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchers._deployment import mismatches
from launchers._shipping import Tree, runtime_tree
from launchers.host import arrival as arrival_module, boot
from launchers.host.arrival import Arrival, Facts, Hello, HostError, shell_command
from launchers.host.link import Frame, write_all
from launchpad_lite.testing import poll_until
from tests.launchers.interpreters import find_other_minor_version, find_python

_SILENCE_S = 8.0
_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def runtime() -> tuple[Tree, bytes]:
    tree = runtime_tree()
    return tree, tree.archive()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the host, which is this machine with another home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path / ".cache" / "launchpad_lite"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host complains of is waited for, however slow the thread is that reads it."""
    monkeypatch.setattr(arrival_module, "_LAST_WORDS_S", _LIMIT_S)
    monkeypatch.setattr(arrival_module, "_CLOSE_S", _LIMIT_S)


def hello(*trees: Tree, **fields: object) -> Hello:
    plain = Hello(tuple(tree.key for tree in trees), (), _SILENCE_S)
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


def soon() -> float:
    return time.monotonic() + _LIMIT_S


@contextlib.contextmanager
def arrived(wanted: Hello, *command: str) -> Iterator[Arrival]:
    """By default where a shell is all that is in between."""
    arrival = Arrival("h1", command or ("sh", "-c", shell_command([sys.executable])), wanted)
    try:
        yield arrival
    finally:
        arrival.close()


def refusal(*command: str, wanted: Hello | None = None) -> str:
    with arrived(wanted or hello(), *command) as arrival, pytest.raises(HostError) as raised:
        arrival.facts(soon())
    return str(raised.value)


def refusal_of(wanted: Hello, archives: Mapping[str, bytes]) -> str:
    with arrived(wanted) as arrival:
        arrival.facts(soon())
        arrival.ship(archives)
        with pytest.raises(HostError) as raised:
            arrival.await_agent(soon())
    return str(raised.value)


def archive(**members: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


# What a host tells


def test_a_host_tells_of_itself() -> None:
    with arrived(hello(packages=("pytest", "no-such-package"))) as arrival:
        facts = arrival.facts(soon())
    assert facts.python == sys.version_info[:3]
    assert Path(facts.executable).samefile(sys.executable)
    assert facts.packages == {"pytest": pytest.__version__, "no-such-package": None}
    here = Facts.here()
    assert (facts.implementation, facts.platform) == (here.implementation, here.platform)
    assert not list(mismatches(here, facts, {"pytest": pytest.__version__}))


def test_what_shells_print_before_does_no_harm() -> None:
    noise = "echo Welcome; printf '\\0launchpad'; head -c 300000 /dev/urandom; echo bad >&2; "
    with arrived(hello(), "sh", "-c", noise + shell_command([sys.executable])) as arrival:
        assert arrival.facts(soon()).python == sys.version_info[:3]


def test_the_first_interpreter_that_is_there_is_taken() -> None:
    command = shell_command(["/no/python", "no-python", sys.executable, "python3"])
    with arrived(hello(), "sh", "-c", command) as arrival:
        assert Path(arrival.facts(soon()).executable).samefile(sys.executable)


def test_an_interpreter_may_have_any_name(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s $HOME; a "python"'
    odd.symlink_to(sys.executable)
    with arrived(hello(), "sh", "-c", shell_command([str(odd)])) as arrival:
        assert arrival.facts(soon()).python == sys.version_info[:3]


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish", "tcsh"])
def test_the_users_shell_may_be_any(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    with arrived(hello(), shell, "-c", shell_command(["/no/python", sys.executable])) as arrival:
        assert arrival.facts(soon()).python == sys.version_info[:3]


def test_modules_of_the_folder_where_it_starts_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json", "tarfile", "socket", "struct", "platform"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    with arrived(hello()) as arrival:
        assert arrival.facts(soon()).python == sys.version_info[:3]


# Refusals


def test_without_python_it_is_said_what_was_looked_for() -> None:
    text = refusal("sh", "-c", shell_command(["/no/python", "python9"]))
    assert text == (
        "h1: no Python was found: there is no /no/python python9. Say which one to use: python="
    )


def test_what_reaches_the_host_and_is_not_there_is_told() -> None:
    with pytest.raises(HostError, match=r"h1: 'no-such-ssh' cannot be started: .*No such file"):
        Arrival("h1", ["no-such-ssh"], hello())


def test_what_the_command_complained_of_is_told() -> None:
    text = refusal("sh", "-c", "echo Permission denied >&2; exit 255")
    assert text == "h1: sh ended with exit code 255: Permission denied"


def test_nothing_stays_open_if_complaints_are_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, went_on = Arrival._listen, threading.Event()

    def listen_late(self: Arrival) -> None:
        assert went_on.wait(_LIMIT_S)
        listen(self)

    monkeypatch.setattr(Arrival, "_listen", listen_late)
    monkeypatch.setattr(arrival_module, "_CLOSE_S", 0.1)
    with arrived(hello()) as arrival:
        arrival.facts(soon())
    went_on.set()
    poll_until(lambda: arrival.process.stderr is not None and arrival.process.stderr.closed)


def test_what_the_command_complained_of_is_told_even_if_it_comes_late() -> None:
    text = refusal("sh", "-c", "(sleep 1; echo Permission denied >&2) >&- & exit 255")
    assert text == "h1: sh ended with exit code 255: Permission denied"


def test_a_host_that_says_nothing_is_given_up() -> None:
    begin = time.monotonic()
    with (
        arrived(hello(), "sleep", "60") as arrival,
        pytest.raises(HostError, match="h1: it did not answer in time"),
    ):
        arrival.facts(time.monotonic() + 0.2)
    assert time.monotonic() - begin < 30
    assert arrival.process.poll() is not None


@pytest.mark.parametrize("version", ["2.7", "3.4", "3.5"])
def test_a_python_that_is_much_too_old_says_so(version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    assert f"Python {version} is too old" in refusal("sh", "-c", shell_command([python]))


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9"])
def test_an_old_python_still_tells_what_it_is(version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    with arrived(hello(packages=("pip",)), "sh", "-c", shell_command([python])) as arrival:
        facts = arrival.facts(soon())
    (mistake,) = mismatches(Facts.here(), facts, {"pip": "0"})
    assert mistake.startswith(f"{facts.executable} is CPython {version}.")


def test_another_minor_version_is_refused_with_what_to_do() -> None:
    python = find_other_minor_version()
    if python is None:
        pytest.skip("there is no other Python here")
    with arrived(hello(), "sh", "-c", shell_command([python])) as arrival:
        facts = arrival.facts(soon())
    (mistake,) = mismatches(Facts.here(), facts, {})
    assert "code travels between the same minor versions only. Name another" in mistake


def test_a_cache_that_others_may_write_to_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    text = refusal()
    assert text == f"h1: {cache}: others may write there: code is not taken from it"


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = refusal(wanted=hello(cache=str(tmp_path / "file" / "cache")))
    assert text.startswith(f"h1: {tmp_path}/file")


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "a/../../outside.py"])
def test_an_archive_cannot_leave_its_folder(cache: Path, name: str) -> None:
    text = refusal_of(hello(trees=("0" * 64,)), {"0" * 64: archive(**{name: b"x"})})
    assert "has no place in an archive of code" in text
    assert not list(cache.rglob("outside.py"))
    assert not Path("/outside.py").exists()
    assert not list((cache / "trees").iterdir())


def test_a_broken_archive_leaves_nothing(cache: Path) -> None:
    whole = archive(**{"module.py": os.urandom(100_000)})
    refusal_of(hello(trees=("0" * 64,)), {"0" * 64: whole[:50_000]})
    assert not list((cache / "trees").iterdir())


# Code


def test_code_comes_up_and_is_kept_for_the_next_time(
    runtime: tuple[Tree, bytes], cache: Path
) -> None:
    tree, packed = runtime
    with arrived(hello(tree)) as arrival:
        assert arrival.facts(soon()).missing == (tree.key,)
        arrival.ship({tree.key: packed})
        arrival.await_agent(soon())
    with arrived(hello(tree)) as again:
        assert again.facts(soon()).missing == ()
        again.ship({})
        again.await_agent(soon())
    assert [each.name for each in (cache / "trees").iterdir()] == [tree.key]


def test_nobody_else_can_read_what_is_kept(runtime: tuple[Tree, bytes], cache: Path) -> None:
    tree, packed = runtime
    with arrived(hello(tree)) as arrival:
        arrival.facts(soon())
        arrival.ship({tree.key: packed})
        arrival.await_agent(soon())
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not [
        each
        for each in cache.rglob("*")
        # What the interpreter writes there has the modes that the user wants.
        if "__pycache__" not in each.parts and each.stat().st_mode & 0o077
    ]


@pytest.mark.slow
def test_several_at_once_share_a_home(runtime: tuple[Tree, bytes], cache: Path) -> None:
    tree, packed = runtime
    with contextlib.ExitStack() as stack:
        arrivals = [stack.enter_context(arrived(hello(tree))) for _ in range(4)]
        assert [each.facts(soon()).missing for each in arrivals] == [(tree.key,)] * 4
        for each in arrivals:
            each.ship({tree.key: packed})
        for each in arrivals:
            each.await_agent(soon())
    assert [each.name for each in (cache / "trees").iterdir()] == [tree.key]


def test_code_that_nobody_used_for_long_goes_and_what_is_used_stays(
    runtime: tuple[Tree, bytes], cache: Path
) -> None:
    tree, packed = runtime
    with arrived(hello(tree)) as arrival:
        arrival.facts(soon())
        arrival.ship({tree.key: packed})
        arrival.await_agent(soon())
    (cache / "trees" / "unused").mkdir()
    for each in (cache / "trees").iterdir():
        os.utime(each, (0, 0))
    with arrived(hello(tree)) as again:
        again.facts(soon())
        again.ship({})
        again.await_agent(soon())
    assert [each.name for each in (cache / "trees").iterdir()] == [tree.key]


def test_the_agent_ends_with_its_link(runtime: tuple[Tree, bytes]) -> None:
    tree, packed = runtime
    with arrived(hello(tree)) as arrival:
        arrival.facts(soon())
        arrival.ship({tree.key: packed})
        arrival.await_agent(soon())
        process = psutil.Process(arrival.process.pid)
        family = [process, *process.children(recursive=True)]
    poll_until(lambda: not any(map(psutil.Process.is_running, family)))


@pytest.mark.parametrize("moment", ["before facts", "before code"])
def test_a_launcher_that_leaves_in_between_leaves_nothing(moment: str) -> None:
    with arrived(hello(trees=("0" * 64,))) as arrival:
        if moment == "before code":
            arrival.facts(soon())
        process = psutil.Process(arrival.process.pid)
    poll_until(lambda: not process.is_running())


@pytest.mark.slow
def test_an_agent_that_slept_listens_again_before_it_gives_up(runtime: tuple[Tree, bytes]) -> None:
    tree, packed = runtime
    silence_s = 10.0
    with arrived(hello(tree, silence_s=silence_s)) as arrival:
        arrival.facts(soon())
        arrival.ship({tree.key: packed})
        arrival.await_agent(soon())
        arrival.link(silence_s)  # from here on, nobody speaks to it but this test
        assert_it_answers(arrival)
        process = psutil.Process(arrival.process.pid)
        family = [process, *process.children(recursive=True)]
        for each in family:
            each.suspend()
        time.sleep(silence_s + 1)  # the fault itself
        for each in family:
            each.resume()
        time.sleep(0.5)  # in which those between, who slept as well, have not passed on anything
        assert_it_answers(arrival)
        say(arrival, "quit")
        assert arrival.process.wait(_LIMIT_S) == 0


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_host_that_slept_before_code_came_listens_again(
    is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    def select(*waited: Any) -> tuple[list[int], list[int], list[int]]:
        waits.append(waited[-1])  # in the first one the machine slept
        return ([0] if len(waits) > 1 and not is_gone else []), [], []

    monkeypatch.setattr(boot, "select", types.SimpleNamespace(select=select))
    link = object.__new__(boot._Link)
    link.silence_s = 8.0
    assert link._is_spoken_to() is not is_gone
    assert sum(waits) == 8 if is_gone else len(waits) == 2


def say(arrival: Arrival, op: str, **fields: object) -> None:
    assert arrival.process.stdin is not None
    write_all(arrival.process.stdin.fileno(), Frame(op, fields).encode())


def assert_it_answers(arrival: Arrival) -> None:
    say(arrival, "reserve", addresses=[])
    frame = arrival.frames.read(soon())
    while frame is not None and frame.op == "alive":  # what it was asked before
        frame = arrival.frames.read(soon())
    assert frame is not None
    assert frame.op == "reserved"


# Environments


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package that pip can install without any index."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    record = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / "tiny-1.5-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "VALUE = 42\n")
        archive.writestr("tiny-1.5.dist-info/METADATA", record)
        archive.writestr("tiny-1.5.dist-info/WHEEL", wheel)
        archive.writestr("tiny-1.5.dist-info/RECORD", "")
    return path


@pytest.mark.slow
def test_an_environment_is_made_once(package: Path, cache: Path) -> None:
    wanted = hello(packages=("tiny",), requirements=f"{package}\n")
    with arrived(wanted) as arrival:
        facts = arrival.facts(soon() + 60)
    assert facts.packages == {"tiny": "1.5"}
    assert Path(facts.executable).is_relative_to(cache / "environments")
    package.unlink()  # what is there is not installed again
    with arrived(wanted) as again:
        assert again.facts(soon()).packages == {"tiny": "1.5"}


@pytest.mark.slow
def test_an_installation_may_take_longer_than_a_host_to_answer(package: Path) -> None:
    wanted = hello(packages=("tiny",), requirements=f"{package}\n")
    with arrived(wanted) as arrival:
        process = psutil.Process(arrival.process.pid)
        poll_until(lambda: children_of(process), 30)  # it has answered, and installs
        assert arrival.facts(time.monotonic()).packages == {"tiny": "1.5"}


@pytest.mark.slow
def test_an_installation_that_fails_is_told_and_tried_again(package: Path, tmp_path: Path) -> None:
    moved = package.rename(tmp_path / package.name)
    wanted = hello(packages=("tiny",), requirements=f"{package}\n")
    with arrived(wanted) as arrival, pytest.raises(HostError, match=r"h1: .*pip install.* failed"):
        arrival.facts(soon() + 60)
    moved.rename(package)
    with arrived(wanted) as again:
        assert again.facts(soon() + 60).packages == {"tiny": "1.5"}


@pytest.mark.slow
def test_an_installation_ends_with_its_launcher(tmp_path: Path) -> None:
    source = tmp_path / "endless"
    source.mkdir()
    (source / "setup.py").write_text("import time\ntime.sleep(600)\n")
    wanted = hello(requirements=f"--no-index --no-build-isolation\n{source}\n")
    # As with ssh, what is ended here is not the interpreter there.
    between = f"cat | {shell_command([sys.executable])[len('exec ') :]} | cat"
    with arrived(wanted, "sh", "-c", between) as arrival:
        process = psutil.Process(arrival.process.pid)
        poll_until(lambda: any("pip" in each for each in children_of(process)), 30)
        family = [process, *process.children(recursive=True)]
    poll_until(lambda: not any(map(psutil.Process.is_running, family)))


def children_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [" ".join(each.cmdline()) for each in process.children(recursive=True)]
    return []


# What must agree


def facts(**fields: object) -> Facts:
    here = Facts((3, 11, 7), "CPython", "/py", ("linux", "x86_64", "glibc"), "h1", {}, ())
    return dataclasses.replace(here, **fields)  # type: ignore[arg-type]


def test_the_patch_version_may_differ() -> None:
    assert not list(mismatches(facts(), dataclasses.replace(facts(), python=(3, 11, 2)), {}))


def test_mismatches_say_what_is_there_and_what_to_do() -> None:
    there = dataclasses.replace(facts(), python=(3, 12, 1))
    (mistake,) = mismatches(facts(), there, {"numpy": "2.0"})
    assert mistake == (
        "/py is CPython 3.12.1, the program is launched by 3.11.7: code travels between the same "
        "minor versions only. Name another interpreter, as in "
        "hosts=['h1:python=/path/to/python3.11'], or python= for all hosts"
    )


def test_another_platform_and_packages_are_told_together() -> None:
    there = facts(platform=("linux", "aarch64", "glibc"), packages={"numpy": "1.9", "jax": None})
    requires = {"numpy": "2.0", "jax": "0.4", "absl-py": "2.1"}
    platform, packages = mismatches(facts(), there, requires)
    assert platform == (
        "it is a linux-aarch64-glibc, the program is launched from a linux-x86_64-glibc; what is "
        "shipped would not run there"
    )
    assert packages == (
        "the program needs numpy 2.0 (1.9 there), jax 0.4 (none there), absl-py 2.1 (none there) "
        "in /py. Install the same versions there, name an interpreter that has them (python=), or "
        "let the launcher install them (requirements='requirements.txt')"
    )
