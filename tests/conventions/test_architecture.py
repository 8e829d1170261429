"""The rules of the house, checked by the same `pytest` that checks behaviour."""

import ast
import importlib
import json
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
    "launchpad_lite._checkpoints",
    "launchpad_lite._launch",
    "launchpad_lite._plan",
    "launchpad_lite.launching",
    "psutil",
    # Python 3.10's platform, which cloudpickle needs, loads it.
    *(["subprocess"] if sys.version_info >= (3, 11) else []),
)

# Spelling aids that an `__init__` may import without exporting them.
NOT_EXPORTS = {"annotations", "TYPE_CHECKING"}


def test_imports_respect_the_contracts() -> None:
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    contracts = subprocess.run(
        [*lint, "--no-cache", "--no-logo"], capture_output=True, text=True, cwd=ROOT
    )
    assert contracts.returncode == 0, contracts.stdout + contracts.stderr


def test_importing_the_packages_loads_nothing_heavy() -> None:
    heavy = _loaded_by(*PACKAGES).intersection(LAZY_MODULES)
    assert not heavy, f"import these inside the functions that use them: {sorted(heavy)}"


def test_agents_load_nothing_that_only_launching_needs() -> None:
    needless = _loaded_by("launchers.host.agent").intersection(LAZY_MODULES + LAUNCHING_MODULES)
    assert not needless, f"import these inside the functions that use them: {sorted(needless)}"


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


@pytest.mark.parametrize(
    "room", [*(f"launchpad_lite/{room}" for room in ROOMS), "compat/launchpad"]
)
def test_rooms_on_top_are_made_of_what_users_have(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            # Decided in one place for all: which files are trusted, what a terminal may show, how the
            # frames of other threads are looked at.
            shared = tuple(
                f"launchpad_lite.{each}." for each in ("_private_files", "_escapes", "_stacks")
            )
            known = (f"{room.replace('/', '.')}.", *shared)
            inside = [name for name in names if not name.startswith(known)]
            hidden = [name for name in inside if name.startswith(PACKAGES) and "._" in name]
            assert not hidden, f"{path.name} reaches below what is public: {hidden}"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_on_top_are_loaded_when_they_are_used(room: str) -> None:
    script = f"import sys, launchpad_lite; assert 'launchpad_lite.{room}' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
