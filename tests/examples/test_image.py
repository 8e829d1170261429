import subprocess
import sys
from pathlib import Path

import launchpad_lite as lp
from tests.examples.running import ROOT


def make_image(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Asks what `make image` would do."""
    return subprocess.run(
        ["make", "--dry-run", "image", f"BIN={Path(sys.executable).parent}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_image_has_the_minor_version_of_the_python_that_launches(tmp_path: Path) -> None:
    command = make_image(f"PYTHON={sys.executable}").stdout
    major, minor = sys.version_info[:2]
    assert f"--build-arg BASE=docker.io/library/python:{major}.{minor}-slim " in command
    another = tmp_path / "python"
    another.write_text("#!/bin/sh\necho 3.99\n")
    another.chmod(0o755)
    assert "docker.io/library/python:3.99-slim " in make_image(f"PYTHON={another}").stdout


def test_a_python_that_does_not_run_is_named() -> None:
    refused = make_image("PYTHON=/no/python")
    assert refused.returncode == 2
    assert "'/no/python' is no Python that runs. Say which one" in refused.stderr


def test_an_image_is_tagged_so_that_clusters_take_the_one_that_was_loaded() -> None:
    assert f"--tag docker.io/library/launchpad-lite:{lp.__version__} " in make_image().stdout


def test_an_image_can_launch_from_inside_of_a_cluster() -> None:
    dockerfile = (ROOT / "examples" / "Dockerfile").read_text()
    assert "pip install --no-cache-dir '/src[kubernetes]' " in dockerfile


def test_packages_of_an_image_may_be_named() -> None:
    assert "--build-arg PACKAGES=" not in make_image().stdout
    assert "--build-arg PACKAGES='torch numpy>=2' " in make_image("PACKAGES=torch numpy>=2").stdout
