"""The rules of the house, checked by the same `pytest` that checks behaviour."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import launchpad_lite

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("courier", "launchpad_lite", "launchers")
#: Rooms of launchpad_lite that are built on top of nodes and calls.
ROOMS = ("engines", "search", "replicas")

# Heavy, or optional, or both: loaded where they are used, not by a research script that only
# describes its program. grpc and protobuf also must not be loaded before workers are forked.
LAZY_MODULES = (
    "absl",
    "asyncio",
    "cma",
    "google.protobuf",
    "graphviz",
    "grpc",
    "jax",
    "kubernetes",
    "numpy",
    "optuna",
    "reverb",
    "ssl",
    "tensorflow",
    "torch",
)

# What a process that launches needs; the agent, and with it each worker, starts without.
LAUNCHING_MODULES = (
    "importlib.metadata",
    "launchpad_lite.worker.checkpoints",
    "launchpad_lite.launching.launch",
    "launchpad_lite.planning.plan",
    "launchpad_lite.launching",
    "psutil",
    # Python 3.10's platform, which cloudpickle needs, loads it.
    *(["subprocess"] if sys.version_info >= (3, 11) else []),
)

# Spelling aids that an `__init__` may import without exporting them.
NOT_EXPORTS = {"annotations", "TYPE_CHECKING", "later"}


def test_imports_respect_the_contracts() -> None:
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    contracts = subprocess.run(
        [*lint, "--no-cache", "--no-logo"], capture_output=True, text=True, cwd=ROOT
    )
    assert contracts.returncode == 0, contracts.stdout + contracts.stderr


def test_importing_the_packages_loads_nothing_heavy() -> None:
    heavy = _loaded_by(*PACKAGES).intersection(LAZY_MODULES)
    assert not heavy, f"import these inside the functions that use them: {sorted(heavy)}"


def test_describing_a_program_loads_neither_clients_nor_servers() -> None:
    loaded = _loaded_by("launchpad_lite", then="from launchpad_lite import search; search.Executor")
    assert "launchpad_lite.search.executor" in loaded
    wires = {"courier.client.client", "courier.server.server", "courier.client._lane"}
    brokers = {f"launchpad_lite.search.{each}" for each in ("_broker", "worker", "searches")}
    needless = loaded.intersection(wires | brokers | set(LAZY_MODULES))
    assert not needless, f"import these inside the functions that use them: {sorted(needless)}"


def test_a_broker_loads_databases_when_it_uses_one() -> None:
    loaded = _loaded_by("launchpad_lite.search._broker")
    assert not loaded.intersection(("sqlite3", "launchpad_lite.search.models"))


def test_agents_load_nothing_that_only_launching_needs() -> None:
    needless = _loaded_by("launchers.host.agent").intersection(LAZY_MODULES + LAUNCHING_MODULES)
    assert not needless, f"import these inside the functions that use them: {sorted(needless)}"


def test_messages_of_a_life_have_one_comparison_for_all() -> None:
    # Every launcher and every agent imports them, and would compile each method that is generated.
    messages = {
        each
        for each in vars(launchpad_lite.life.events).values()
        if isinstance(each, type)
        and issubclass(each, launchpad_lite.life.events.StopAsked.__base__)
    }
    assert len(messages) > 20
    generated = [each for each in messages if {"__eq__", "__repr__"} & {*vars(each)}]
    assert [each.__name__ for each in generated] == ["_Message"]


def test_a_launch_loads_nothing_heavy() -> None:
    # Nor what knows all that is installed, and takes as long as all else before the start of an agent.
    loaded = _loaded_by("launchpad_lite", then=_LAUNCH)
    assert "launchers.process" in loaded
    needless = loaded.intersection((*LAZY_MODULES, "importlib.metadata", "psutil"))
    assert not needless, f"import these inside the functions that use them: {sorted(needless)}"


_LAUNCH = """
program = launchpad_lite.Program("small")
program.add_node(launchpad_lite.PyNode(int), label="a")
assert launchpad_lite.launch(program, "test_mp").wait().outcome is launchpad_lite.Outcome.COMPLETED
"""


def _loaded_by(*modules: str, then: str = "") -> set[str]:
    """Returns what is loaded when these are imported, and this is run in a script with an argument."""
    script = (
        f"import json, sys, {', '.join(modules)}\n{then}\nprint(json.dumps(sorted(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", script, "argument"]
    imported = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert imported.returncode == 0, imported.stderr
    return set(json.loads(imported.stdout))


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_is_typed_and_lists_its_public_names_in_order(name: str) -> None:
    assert (ROOT / name / "py.typed").is_file()
    package = importlib.import_module(name)
    listed = set(package.__all__)
    missing = {export for export in listed if not hasattr(package, export)}
    assert not missing, f"{name}.__all__ lists what {name} does not have: {sorted(missing)}"
    unlisted = _public_names(package) - listed
    assert not unlisted, f"{name}.__all__ does not list {sorted(unlisted)}"
    assert list(package.__all__) == sorted(listed, key=_listing_order)
    found = dir(package)  # completion lists it; above, all names were used
    assert listed <= set(found)
    assert len(found) == len(set(found))


def test_the_package_of_the_original_is_typed_and_needs_the_version_that_it_comes_with() -> None:
    assert (ROOT / "compat/launchpad/py.typed").is_file()
    required = f'dependencies = ["launchpad-lite=={launchpad_lite.__version__}"]'
    assert required in (ROOT / "compat/pyproject.toml").read_text(encoding="utf-8").splitlines()


def _public_names(package: ModuleType) -> set[str]:
    names = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    return names - NOT_EXPORTS


def _listing_order(name: str) -> tuple[bool, bool, str]:
    """As ruff's RUF022: constants, then classes, then the rest."""
    return not name.isupper(), not name[:1].isupper(), name


def test_files_of_other_distributions_are_told_from_ours() -> None:
    from courier import _distributions
    from launchpad_lite.parts import own_packages

    ours = {"courier": _distributions._MODULES, "launchers": own_packages._LAUNCHERS}
    for package, modules in ours.items():
        assert {path.name for path in (ROOT / package).glob("*.py")} == set(modules)


def test_modules_with_an_underscore_are_imported_only_in_their_folder() -> None:
    for path in [
        path for package in (*PACKAGES, "compat") for path in (ROOT / package).rglob("*.py")
    ]:
        importer = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                folder = re.split(r"\._(?!_)", name)[0]
                inside = folder == name or importer.startswith(f"{folder}.")
                assert inside or not name.startswith(PACKAGES), f"{path.name} imports {name}"


def test_no_two_classes_have_one_name_but_those_that_the_page_lists() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = page.partition("These names stand for several classes:")[2].partition("## ")[0]
    found: dict[str, list[str]] = {}
    for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert several.keys() == set(re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE)), several


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_on_top_are_loaded_when_they_are_used(room: str) -> None:
    script = f"import sys, launchpad_lite; assert 'launchpad_lite.{room}' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
