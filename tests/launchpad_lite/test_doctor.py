"""`doctor`: what it finds on machines that lack something, and how it weighs that."""

import functools
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from absl.testing import flagsaver

import launchpad_lite as lp
from launchpad_lite.cli._doctor import graded, judge_gpus, run_checks
from launchpad_lite.cli.command_line import main
from launchpad_lite.launching import Finding
from tests.engines import needs_root

Findings = Mapping[str, Mapping[str, str]]
#: What reads its findings, and the exit code.
Doctor = Callable[..., "tuple[int, Findings]"]


def read(printed: str) -> Findings:
    return {each["check"]: each for each in json.loads(printed)["findings"]}


def run_alone(folder: Path, *before: str, **options: Any) -> tuple[int, Findings]:
    """Runs it in a process of its own, behind another command; returns the exit code and findings."""
    command = [*before, sys.executable, "-m", "launchpad_lite.launch", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, **options)
    return done.returncode, read(done.stdout)


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Doctor:
    """Runs it in this process, on a machine that has no other programs and no cluster."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)

    def run(*arguments: str) -> tuple[int, Findings]:
        with flagsaver.flagsaver():
            code = main([*arguments, "--json"])
        return code, read(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(("amount", "verdict"), [(31, "fail"), (32, "warn"), (1024, "ok")])
def test_less_than_every_program_needs_fails_and_less_than_some_need_warns(
    amount: int, verdict: str
) -> None:
    found = graded("text", amount, "remedy", enough=1024, fewest=32)
    assert found == Finding(verdict, "text", "" if verdict == "ok" else "remedy")


@pytest.mark.parametrize(
    ("devices", "verdict"), [("0", "ok"), ("GPU-5a", "ok"), ("1", "warn"), ("GPU-6", "warn")]
)
def test_devices_that_the_driver_does_not_list_are_named(devices: str, verdict: str) -> None:
    listed = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a7c)\n"
    found = judge_gpus([devices], "CUDA_VISIBLE_DEVICES shows", listed)
    assert found.verdict == verdict
    assert (devices in found.remedy) == (verdict == "warn")


def test_one_check_that_hangs_or_raises_holds_up_no_other() -> None:
    release = threading.Event()

    def hang() -> Finding:
        release.wait()
        return Finding("ok", "late")

    def fail() -> Finding:
        raise lp.errors.MissingExtraError("pip install it")

    checks = {"first": hang, "second": fail, "third": lambda: Finding("ok", "here")}
    found = dict(run_checks(checks, limit_s=0.2))
    release.set()
    assert found["first"] == Finding("fail", "no answer within 0.2 s")
    assert found["second"] == Finding("fail", "pip install it")
    assert found["third"] == Finding("ok", "here")


def test_what_is_not_here_fails_only_if_it_is_named(doctor: Doctor) -> None:
    code, found = doctor("doctor")
    assert code == 0
    assert {found[name]["verdict"] for name in ("ssh", "slurm", "kubernetes")} == {"none"}
    assert found["python"]["verdict"] == "ok"
    code, found = doctor("doctor", "h1")
    assert code == 1
    assert found["ssh"]["verdict"] == found["host h1"]["verdict"] == "fail"
    assert "slurm" not in found
    assert doctor("--launcher=slurm", "doctor")[1]["slurm"]["verdict"] == "fail"


def test_a_folder_where_others_may_replace_files_fails_with_the_variable_that_names_another(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe = tmp_path / "runs"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    monkeypatch.setenv("LAUNCHPAD_LOGGING_DIR", str(unsafe))
    code, found = doctor("--launcher=local_mt", "doctor")
    assert code == 1
    assert str(unsafe) in found["folder of runs"]["text"]
    assert "LAUNCHPAD_LOGGING_DIR" in found["folder of runs"]["remedy"]


def test_an_answer_is_one_line_that_changes_nothing_else_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: \\033[2Jone\\nGPU 1: two\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with flagsaver.flagsaver():
        assert main(["--launcher=local_mt", "doctor"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "gpu: " in each]
    assert line.startswith("ok    gpu: ")
    assert line.endswith("GPU 0: one | GPU 1: two")


def test_too_few_open_files_fail(tmp_path: Path) -> None:
    few = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (30, 30))
    code, found = run_alone(tmp_path, preexec_fn=few)
    assert code == 1
    assert found["open files"]["verdict"] == "fail"
    assert "ulimit -n" in found["open files"]["remedy"]


@needs_root
@pytest.mark.slow
def test_a_tiny_dev_shm_and_a_loopback_that_is_down_are_found(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    code, found = run_alone(tmp_path, "unshare", "--mount", "--net", "sh", "-c", mount, "sh")
    assert code == 1
    assert found["shared memory"]["verdict"] == "warn"
    assert "0.1 MiB free" in found["shared memory"]["text"]
    assert "--shm-size" in found["shared memory"]["remedy"]
    assert found["loopback"]["verdict"] == "fail"
    assert "lo up" in found["loopback"]["remedy"]
