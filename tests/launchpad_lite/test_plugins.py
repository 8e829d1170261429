"""Launchers of third parties, found by their entry points."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

import launchpad_lite as lp
from launchpad_lite.launching import get_launcher, installed_launchers

THREADS = get_launcher("local_mt")
BUILT_IN = {"local_mt", "local_mp", "test_mt", "test_mp"}

MODULE = """
from launchpad_lite.launching import Launcher

class Mine(Launcher):
    description = "somewhere else"
    interface = 1

    def __init__(self, region="here"):
        self.region = region

    def mistakes(self, executables):
        return [f"{each.name} is too big" for each in executables if each.resources.cpu == 99]

    def notes(self, executables):
        return [f"{len(executables)} nodes in {self.region}"]

    def start(self, plan, options):
        raise NotImplementedError

class Later(Mine):
    interface = 2

class Undated(Mine):
    interface = None

class Near(Mine):
    def __init__(self, distance=1, **options):
        super().__init__(**options)

class NoLauncher:
    pass
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution with entry points, as pip does."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "my_launchers.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "my_launchers", raising=False)

    def install(distribution: str, **launchers: str) -> None:
        folder = tmp_path / f"{distribution}-1.0.dist-info"
        folder.mkdir()
        folder.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = "".join(f"{name} = {value}\n" for name, value in launchers.items())
        folder.joinpath("entry_points.txt").write_text(f"[launchpad_lite.launchers]\n{lines}")

    return install


def small_program() -> lp.Program:
    program = lp.Program("small")
    program.add_node(lp.PyNode(print), label="a")
    return program


def test_an_installed_launcher_is_found_by_name_beside_the_built_in_ones(install: Install) -> None:
    install("my-launchers", mine="my_launchers:Mine")
    assert set(installed_launchers()) >= BUILT_IN | {"mine"}
    plan = lp.plan(small_program(), "mine", region="there")
    assert (plan.launcher, plan.where) == ("mine", "somewhere else")
    assert str(plan).endswith("note: 1 nodes in there")
    assert get_launcher("local_mt").name == "local_mt"


def test_what_a_launcher_refuses_is_a_mistake_of_the_program(install: Install) -> None:
    install("my-launchers", mine="my_launchers:Mine")
    with pytest.raises(lp.ProgramError, match=r"a\[0\] is too big"):
        lp.launch(small_program(), "mine", {"a": {"cpu": 99}})


def test_a_launcher_that_extends_another_has_its_options_too(install: Install) -> None:
    install("my-launchers", near="my_launchers:Near")
    assert lp.plan(small_program(), "near", distance=2, region="there").notes == (
        "1 nodes in there",
    )
    with pytest.raises(
        TypeError, match=r"distanse= \(did you mean distance=\?\).* takes region, distance\)?$"
    ):
        lp.plan(small_program(), "near", distanse=2)


def test_a_launcher_may_be_given_as_an_object(install: Install) -> None:
    install("my-launchers", mine="my_launchers:Mine")
    launcher = get_launcher("mine", {"region": "there"})
    assert lp.plan(small_program(), launcher).notes == ("1 nodes in there",)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (["mine"], {"launch_type": "local_mt"}, "launch_type is the original's name of launcher"),
        ([{"a": {"cpu": 1}}], {"resources": {"a": {"cpu": 2}}}, "resources= are given by name and"),
        (["mine"], {"processes": {"a": {}}, "local_resources": {"a": {}}}, "local_resources"),
        ([get_launcher("local_mt")], {"region": "there"}, r"region=.*ThreadLauncher\(\.\.\.\)"),
    ],
)
def test_what_is_said_twice_or_to_nobody_is_a_type_error(
    install: Install, arguments: list[Any], options: dict[str, Any], words: str
) -> None:
    install("my-launchers", mine="my_launchers:Mine")
    with pytest.raises(TypeError, match=words):
        lp.launch(small_program(), *arguments, **options)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("not_there_at_all:Mine", "No module named 'not_there_at_all'"),
        ("my_launchers:Nothing", "Nothing"),
        ("my_launchers:NoLauncher", r"no launchpad_lite\.launching\.Launcher"),
        ("my_launchers", r"no launchpad_lite\.launching\.Launcher"),
        ("my_launchers:Later", r"says interface = 2; .* version 1 .* set interface = 1"),
        ("my_launchers:Undated", "says interface = None; .* version 1"),
    ],
)
def test_a_broken_launcher_is_an_error_of_its_own_only(
    install: Install, value: str, words: str
) -> None:
    install("broken", broken=value, mine="my_launchers:Mine")
    with pytest.raises(lp.LauncherLoadError, match=words) as failed:
        get_launcher("broken")
    assert value in str(failed.value)
    assert get_launcher("mine").name == "mine"
    assert set(installed_launchers()) >= BUILT_IN


def test_two_launchers_with_one_name_are_an_error_that_names_both(install: Install) -> None:
    install("first", mine="my_launchers:Mine")
    install("second", mine="my_launchers:Other")
    with pytest.raises(lp.UnknownLauncherError, match=r"my_launchers:Mine, my_launchers:Other"):
        get_launcher("mine")


def test_a_name_of_ours_stays_ours(install: Install) -> None:
    install("first", local_mt="my_launchers:Mine")
    assert type(get_launcher("local_mt")) is type(THREADS)
    assert installed_launchers().count("local_mt") == 1


@pytest.mark.parametrize(
    ("launcher", "option", "words"),
    [
        ("mine", "regoin=there", r"'regoin' \(did you mean 'region'\?\); .* 'mine' takes region$"),
        ("local_mt", "region=there", "the launcher 'local_mt' takes none$"),
        ("slurm", "nodes=many", "expected int or JSON like"),
        (get_launcher("local_mt"), "region=there", r"the script passes ThreadLauncher\(\.\.\.\)"),
    ],
)
def test_options_on_the_command_line_that_a_launcher_does_not_take_are_told(
    install: Install, launcher: Any, option: str, words: str
) -> None:
    install("my-launchers", mine="my_launchers:Mine")
    with (
        flagsaver.flagsaver(lp_launcher_option=[option]),
        pytest.raises(lp.LaunchError, match=f"--lp_launcher_option={option}: .*{words}"),
    ):
        lp.plan(small_program(), launcher)


def test_an_unknown_launcher_is_told_with_those_that_are_installed() -> None:
    unknown: Any = "nonsense"
    with pytest.raises(lp.UnknownLauncherError, match=r"'nonsense'.*local_mp, local_mt"):
        lp.plan(small_program(), unknown)
