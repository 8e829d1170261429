"""How an agent gets onto a host that has nothing but Python, and what is told if it does not."""

import contextlib
import dataclasses
import io
import os
import shutil
import stat
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from launchers.host.boot import is_spoken_to
from launchers.host.link import LinkFrame, write_all
from launchers.hosts.arrival import Arrival, Facts, Hello
from launchpad_lite.errors import LaunchError
from launchpad_lite.testing import poll_until
from tests.launchers.interpreters import find_other_minor_version, find_python
from tests.launchers.running import shell_command

#: What a host complains of is waited for, however slow the thread is that reads it.
_LIMIT_S = 60.0
_KEY = "0" * 64


def archive(**members: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


#: Code with an agent that ends with its link.
_CODE = archive(
    **{
        "launchers/__init__.py": b"",
        "launchers/host/__init__.py": b"",
        "launchers/host/agent.py": b"""
import os
def main(*arguments, **options):
    while os.read(0, 1):
        pass
""",
    }
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the host, which is this machine with another home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path / ".cache" / "launchpad_lite"


def hello(*trees: str, **fields: object) -> Hello:
    return dataclasses.replace(Hello(trees, (), 8.0), **fields)  # type: ignore[arg-type]


def soon() -> float:
    return time.monotonic() + _LIMIT_S


@contextlib.contextmanager
def arrived(wanted: Hello, *command: str, close_s: float = _LIMIT_S) -> Iterator[Arrival]:
    """By default where a shell is all that is in between."""
    way = command or ("sh", "-c", shell_command([sys.executable]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launchers.hosts.arrival._LAST_WORDS_S", _LIMIT_S)
        patch.setattr("launchers.hosts.arrival._CLOSE_S", close_s)
        with contextlib.closing(Arrival("h1", way, wanted)) as arrival:
            yield arrival


def facts_by(*command: str, **fields: object) -> Facts:
    with arrived(hello(**fields), *command) as arrival:
        return arrival.facts(soon())


def bring_code(arrival: Arrival, *, missing: bool = True) -> None:
    assert arrival.facts(soon()).missing == ((_KEY,) if missing else ())
    arrival.ship({_KEY: _CODE} if missing else {})
    arrival.await_agent(soon())


def refusal(*command: str, **fields: object) -> str:
    with pytest.raises(LaunchError) as raised:
        facts_by(*command, **fields)
    return str(raised.value)


def refusal_of(archives: Mapping[str, bytes]) -> str:
    with arrived(hello(_KEY)) as arrival:
        arrival.facts(soon())
        arrival.ship(archives)
        with pytest.raises(LaunchError) as raised:
            arrival.await_agent(soon())
    return str(raised.value)


def family_of(arrival: Arrival) -> list[psutil.Process]:
    process = psutil.Process(arrival.process.pid)
    return [process, *process.children(recursive=True)]


def assert_gone(family: list[psutil.Process]) -> None:
    poll_until(lambda: not any(map(psutil.Process.is_running, family)))


# What a host tells


def test_a_host_tells_of_itself() -> None:
    facts, here = facts_by(packages=("pytest", "no-such-package")), Facts.here()
    assert Path(facts.executable).samefile(sys.executable)
    assert facts.packages == {"pytest": pytest.__version__, "no-such-package": None}
    for field in ("python", "implementation", "platform"):
        assert getattr(facts, field) == getattr(here, field)


def test_what_shells_print_before_does_no_harm() -> None:
    noise = "echo Welcome; printf '\\0launchpad'; head -c 300000 /dev/urandom; echo bad >&2; "
    facts = facts_by("sh", "-c", noise + shell_command([sys.executable]))
    assert facts.python == sys.version_info[:3]


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "fish", "tcsh"])
def test_any_shell_takes_the_first_interpreter_that_is_there(shell: str, tmp_path: Path) -> None:
    """A path may begin at the home."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    odd = tmp_path / 'it\'s $HOME; a "python"'
    odd.symlink_to(sys.executable)
    command = shell_command(["/no/python", "no-python", f"~/{odd.name}", "false"])
    assert Path(facts_by(shell, "-c", command).executable).samefile(sys.executable)


def test_modules_of_the_folder_where_it_starts_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json", "tarfile", "socket", "struct", "platform"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    assert facts_by().python == sys.version_info[:3]


@pytest.mark.parametrize("version", ["2.7", "3.4", "3.5", "3.6", "3.7", "3.8", "3.9", "another"])
def test_another_python_tells_what_it_is(version: str) -> None:
    python = find_other_minor_version() if version == "another" else find_python(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    command = ("sh", "-c", shell_command([python]))
    if version in ("2.7", "3.4", "3.5", "3.6", "3.7"):
        assert f"Python {version} is too old" in refusal(*command)
        return
    facts = facts_by(*command, packages=("pip",))
    assert facts.python[:2] != sys.version_info[:2]
    assert version in ("another", "{}.{}".format(*facts.python))


# Refusals


def test_without_python_it_is_said_what_was_looked_for() -> None:
    text = refusal("sh", "-c", shell_command(["/no/python", "python9"]))
    assert text == (
        "h1: no Python was found: there is no /no/python python9. Say which one to use: python="
    )


def test_what_reaches_the_host_and_is_not_there_is_told() -> None:
    with pytest.raises(LaunchError, match=r"h1: 'no-such-ssh' cannot be started: .*No such file"):
        Arrival("h1", ["no-such-ssh"], hello())


def test_what_the_command_complained_of_is_told() -> None:
    text = refusal("sh", "-c", "echo Permission denied >&2; exit 255")
    assert text == "h1: sh ended with exit code 255: Permission denied"


def test_what_it_said_on_standard_output_is_told_if_nothing_else_came() -> None:
    text = refusal("sh", "-c", "printf 'Keep out.\\n\\nBy order'; echo refused >&2; exit 1")
    assert text == "h1: sh ended with exit code 1: refused; Keep out.; By order"


def test_what_the_command_complained_of_is_told_even_if_it_comes_late() -> None:
    after = "while kill -0 $$ 2>/dev/null; do sleep 0.01; done; echo Permission denied >&2"
    text = refusal("sh", "-c", f"({after}) >&- & exit 255")
    assert text == "h1: sh ended with exit code 255: Permission denied"


def test_complaints_are_read_to_their_end_though_nobody_waits_for_them(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    holds_on = f"(read line <{gate}) >&- &"  # its standard error stays open
    command = ("sh", "-c", f"{holds_on} {shell_command([sys.executable])}")
    with arrived(hello(), *command, close_s=0.1) as arrival:
        arrival.facts(soon())
    stderr = arrival.process.stderr
    assert stderr is not None
    assert not stderr.closed
    gate.write_text("go on\n")
    poll_until(lambda: stderr.closed)


def test_a_host_that_says_nothing_is_given_up() -> None:
    with (
        arrived(hello(), "sleep", "600") as arrival,
        pytest.raises(LaunchError, match="h1: it did not answer in time"),
    ):
        arrival.facts(time.monotonic())
    assert arrival.process.poll() is not None


@pytest.mark.parametrize("above", [0, 2])
def test_a_cache_that_others_may_replace_is_not_used(
    cache: Path, above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    cache.mkdir(parents=True)
    folder = (cache, *cache.parents)[above]
    folder.chmod(0o777)
    assert refusal() == f"h1: {folder}: others may write there: code is not taken from it"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: needs root")
def test_a_cache_below_a_folder_of_a_stranger_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    tmp_path.chmod(0o1777)
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    os.chown(stranger, 4711, -1)
    text = refusal(cache=str(stranger / "cache"))
    assert text == f"h1: {stranger}: others may write there: code is not taken from it"


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = refusal(cache=str(tmp_path / "file" / "cache"))
    assert text.startswith(f"h1: {tmp_path}/file")


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "a/../../outside.py"])
def test_an_archive_cannot_leave_its_folder(cache: Path, name: str) -> None:
    text = refusal_of({_KEY: archive(**{name: b"x"})})
    assert "has no place in an archive of code" in text
    assert not list(cache.rglob("outside.py"))
    assert not Path("/outside.py").exists()
    assert not list((cache / "trees").iterdir())


def test_a_broken_archive_leaves_nothing(cache: Path) -> None:
    whole = archive(**{"module.py": os.urandom(100_000)})
    refusal_of({_KEY: whole[:50_000]})
    assert not list((cache / "trees").iterdir())


# Code


def test_code_is_kept_for_the_next_time_and_for_nobody_else(cache: Path) -> None:
    with arrived(hello(_KEY)) as arrival:
        bring_code(arrival)
        family = family_of(arrival)
    assert_gone(family)
    (cache / "trees" / "unused").mkdir()
    for each in (cache / "trees").iterdir():
        os.utime(each, (0, 0))
    with arrived(hello(_KEY)) as again:
        bring_code(again, missing=False)
    # What is used stays, and what was not used for long goes.
    assert [each.name for each in (cache / "trees").iterdir()] == [_KEY]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not [
        each
        for each in cache.rglob("*")
        # What the interpreter writes there has the modes that the user wants.
        if "__pycache__" not in each.parts and each.stat().st_mode & 0o077
    ]


def test_several_at_once_share_a_home(cache: Path) -> None:
    with contextlib.ExitStack() as stack:
        arrivals = [stack.enter_context(arrived(hello(_KEY))) for _ in range(4)]
        assert [each.facts(soon()).missing for each in arrivals] == [(_KEY,)] * 4
        for each in arrivals:
            each.ship({_KEY: _CODE})
        for each in arrivals:
            each.await_agent(soon())
    assert [each.name for each in (cache / "trees").iterdir()] == [_KEY]


@pytest.mark.parametrize("moment", ["before facts", "before code"])
def test_a_launcher_that_leaves_in_between_leaves_nothing(moment: str) -> None:
    with arrived(hello(_KEY)) as arrival:
        if moment == "before code":
            arrival.facts(soon())
        family = family_of(arrival)
    assert_gone(family)


@pytest.mark.slow
def test_an_agent_that_slept_listens_again_before_it_gives_up() -> None:
    silence_s = 10.0
    with arrived(hello(_KEY, silence_s=silence_s)) as arrival:
        arrival.facts(soon())
        arrival.ship({_KEY: archive()})  # so the agent of this environment is taken
        arrival.await_agent(soon())
        arrival.link()  # from here on, nobody speaks to it but this test
        assert_it_answers(arrival)
        family = family_of(arrival)
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
def test_a_host_that_slept_before_code_came_listens_again(is_gone: bool) -> None:
    waits: list[float] = []

    def listen(wait_s: float) -> bool:
        waits.append(wait_s)  # in the first one the machine slept
        return len(waits) > 1 and not is_gone

    assert is_spoken_to(8.0, listen) is not is_gone
    assert sum(waits) == 8 if is_gone else len(waits) == 2


def say(arrival: Arrival, op: str, **fields: object) -> None:
    assert arrival.process.stdin is not None
    write_all(arrival.process.stdin.fileno(), LinkFrame(op, fields).encode())


def assert_it_answers(arrival: Arrival) -> None:
    say(arrival, "reserve", addresses=[])
    frame = arrival.frames.read(soon())
    while frame is not None and frame.op == "alive":  # what it was asked before
        frame = arrival.frames.read(soon())
    assert frame is not None
    assert frame.op == "reserved"


# Environments


@pytest.mark.slow
def test_an_environment_is_made_once_and_what_failed_is_tried_again(
    package: Path, cache: Path, tmp_path: Path
) -> None:
    wanted = hello(packages=("tiny",), requirements=f"{package}\n")
    moved = package.rename(tmp_path / package.name)
    with (
        arrived(wanted) as arrival,
        pytest.raises(LaunchError, match=r"h1: .*pip install.* failed"),
    ):
        arrival.facts(soon())
    moved.rename(package)
    with arrived(wanted) as arrival:
        process = psutil.Process(arrival.process.pid)
        poll_until(process.children, 30)  # it has answered, and installs
        # That may take longer than a host has to answer.
        facts = arrival.facts(time.monotonic())
    assert facts.packages == {"tiny": "1.5"}
    assert Path(facts.executable).is_relative_to(cache / "environments")
    package.unlink()  # what is there is not installed again
    with arrived(wanted) as again:
        assert again.facts(soon()).packages == {"tiny": "1.5"}


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
        poll_until(lambda: any("pip" in each for each in commands_below(process)), 30)
        family = family_of(arrival)
    assert_gone(family)


def commands_below(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [" ".join(each.cmdline()) for each in process.children(recursive=True)]
    return []
