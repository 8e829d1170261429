"""The packages as they are released: built in a clone, installed from their wheels in empty environments."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conventions.test_pages import blocks

_ROOT = Path(__file__).resolve().parents[2]
_VERSION = "99.0.0"
_UV = (sys.executable, "-m", "uv")
_WHEELS = ("--only-binary", ":all:", "--no-binary", "pyspark")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (_ROOT / ".git").exists(), reason="needs a checkout"),
]


def run(*command: "str | Path", folder: Path, is_ok: bool = True, **variables: str) -> str:
    """Runs a command with nothing of this checkout on its path; returns what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON"))}
    for who in ("AUTHOR", "COMMITTER"):
        environment[f"GIT_{who}_NAME"] = environment[f"GIT_{who}_EMAIL"] = "packages@example.org"
    done = subprocess.run(
        command, cwd=folder, env=environment | variables, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert (done.returncode == 0) is is_ok, done.stdout
    return done.stdout.strip()


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this checkout, with what is not committed, and a release that was made in it."""
    folder = tmp_path_factory.mktemp("packages") / "clone"
    run("git", "clone", "--quiet", _ROOT, folder, folder=_ROOT)
    patch = subprocess.run(["git", "diff", "HEAD"], cwd=_ROOT, stdout=subprocess.PIPE).stdout
    if patch:
        subprocess.run(["git", "apply"], cwd=folder, input=patch, check=True)
        run("git", "commit", "--quiet", "--all", "--message=changes", folder=folder)
    before = run("git", "rev-parse", "HEAD", folder=folder)
    run(sys.executable, ".ci/release.py", "release", _VERSION, "--dry-run", folder=folder)
    assert run("git", "rev-parse", "HEAD", folder=folder) == before
    assert run("git", "tag", folder=folder) == ""
    run("sha256sum", "--check", "SHA256SUMS", folder=folder / "dist")
    run(sys.executable, ".ci/release.py", "release", _VERSION, folder=folder)
    return folder


def install(environment: Path, *what: str) -> Path:
    """Makes an environment that has only these; returns its Python."""
    python = environment / "bin" / "python"
    venv = (*_UV, "venv", "--quiet", "--seed", "--python", sys.executable)
    run(*venv, environment, folder=Path.cwd())
    run(*_UV, "pip", "install", "--quiet", "--python", python, *what, folder=Path.cwd())
    return python


def wheel(released: Path, name: str = "launchpad_lite") -> str:
    return str(released / "dist" / f"{name}-{_VERSION}-py3-none-any.whl")


def test_a_release_is_a_commit_and_a_tag_with_the_notes_and_the_files(released: Path) -> None:
    tag = f"v{_VERSION}"
    assert run("git", "log", "-1", "--format=%s %D", folder=released).startswith(
        f"release: {_VERSION} HEAD"
    )
    assert run("git", "rev-parse", f"{tag}^{{}}", folder=released) == run(
        "git", "rev-parse", "HEAD", folder=released
    )
    assert run("git", "status", "--porcelain", folder=released) == ""
    changelog = (released / "CHANGELOG.md").read_text(encoding="utf-8")
    notes = re.search(
        rf"## \[Unreleased\]\n\n## \[{_VERSION}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=\n## \[|\Z)",
        changelog,
        re.DOTALL,
    )
    assert notes
    message = run("git", "tag", "--list", "--format=%(contents)", tag, folder=released)
    assert message == f"{_VERSION}\n\n{notes[1].strip()}"
    assert sorted(path.name for path in (released / "dist").iterdir()) == [
        "SHA256SUMS",
        f"launchpad_lite-{_VERSION}-py3-none-any.whl",
        f"launchpad_lite-{_VERSION}.tar.gz",
        f"launchpad_lite_compat-{_VERSION}-py3-none-any.whl",
        f"launchpad_lite_compat-{_VERSION}.tar.gz",
    ]


def test_another_clone_of_the_tag_builds_the_same_bytes(released: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    run("git", "clone", "--quiet", f"--branch=v{_VERSION}", released, again, folder=tmp_path)
    run(sys.executable, ".ci/release.py", "build", folder=again, TZ="Asia/Tokyo")
    sums = [(folder / "dist/SHA256SUMS").read_text() for folder in (released, again)]
    assert sums[0] == sums[1]


@pytest.mark.parametrize(
    ("version", "error"),
    [
        (_VERSION, "does not follow"),
        ("98.0.0", "does not follow"),
        ("100", "is no version"),
        ("100.0.0", "nothing under Unreleased"),
    ],
)
def test_a_version_that_cannot_be_released_is_refused(
    released: Path, version: str, error: str
) -> None:
    command = (sys.executable, ".ci/release.py", "release", version)
    assert error in run(*command, folder=released, is_ok=False)
    assert run("git", "worktree", "list", folder=released).count("\n") == 0


def test_installed_wheels_run_in_an_empty_environment(released: Path, tmp_path: Path) -> None:
    python = install(
        tmp_path / "environment",
        f"{wheel(released)}[demo,testing]",
        wheel(released, "launchpad_lite_compat"),
    )
    (tmp_path / "hello.py").write_text(blocks("python")[0])
    assert run(python, "hello.py", folder=tmp_path).startswith("[visitor[0]] hello, world\n")
    (tmp_path / "original.py").write_text(_ORIGINAL)
    assert "the original greets" in run(python, "original.py", folder=tmp_path)
    (tmp_path / "examples").symlink_to(_ROOT / "examples")
    demo = run(python, "-m", "examples.actor_learner.launch", "--max-seconds=50", folder=tmp_path)
    assert "mean return" in demo  # on all machines, however fast they learn
    tests = run(python, "-m", "pytest", "--quiet", "--pyargs", "launchpad_lite", folder=tmp_path)
    assert re.search(r"^\d+ passed in", tests.splitlines()[-1]), tests
    found = "import courier, launchers, launchpad, launchpad_lite; print(launchpad_lite.__file__)"
    assert str(tmp_path / "environment") in run(python, "-c", found, folder=tmp_path)


_ORIGINAL = """
import launchpad as lp


def greet():
    print("the original greets")


if __name__ == "__main__":
    program = lp.Program("original")
    program.add_node(lp.PyNode(greet), label="greeter")
    lp.launch(program, launch_type="test_mt").wait()
"""


@pytest.mark.parametrize("is_ours_last", [True, False])
def test_the_courier_of_pypi_and_ours_are_told_apart(
    released: Path, tmp_path: Path, is_ours_last: bool
) -> None:
    python = install(tmp_path / "environment", wheel(released))
    theirs = ("pip", "install", "--quiet", "--no-deps", "courier==1.2.2")
    ours = ("pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel(released))
    for command in (theirs, ours) if is_ours_last else (theirs,):
        run(python, "-m", *command, folder=tmp_path)
    error = ""
    for statement in ("import launchpad_lite", *(["import courier"] if is_ours_last else [])):
        error = run(python, "-c", statement, folder=tmp_path, is_ok=False).splitlines()[-1]
        folder = next((tmp_path / "environment/lib").glob("python*/site-packages")) / "courier"
        assert error.startswith(
            f"ImportError: launchpad-lite at {folder} and courier 1.2.2 at {folder}"
        )
    advice = re.search(r"run: (pip uninstall [^;]+); (pip install [^.]+)\.", error)
    assert advice
    for command in advice.groups():
        run(python, "-m", *command.split(), folder=tmp_path, PIP_FIND_LINKS=str(released / "dist"))
    run(python, "-c", "import launchpad_lite, courier; courier.Client", folder=tmp_path)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
def test_all_extras_have_wheels_on_each_python(tmp_path: Path, version: str) -> None:
    metadata = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = metadata.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    # TensorFlow, which comes with Reverb, wants older packages than the others.
    for together in (extras - {"reverb"}, {"reverb"}):
        asked = [f"--extra={extra}" for extra in sorted(together)]
        compiled = run(
            *_UV, "pip", "compile", "--quiet", "--no-header", _ROOT / "pyproject.toml", *asked,
            *_WHEELS, f"--python-version={version}", "--python-platform=x86_64-manylinux_2_28",
            folder=tmp_path,
        )  # fmt: skip
        assert "grpcio==" in compiled
