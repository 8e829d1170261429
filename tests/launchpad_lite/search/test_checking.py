"""`check-worker` names what a worker in another language does wrong."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launchpad_lite.search.searches import ROOT

_CHECKS = ["proof", "joining", "tasks", "failures", "sizes", "leases", "stops", "restarts"]
_CHECKS += ["leaving", "end"]
_PAYLOADS = {"payload": "0 abc", "long-payload": "5 abc", "bad-payload": "nonsense"}


def check(
    folder: Path, kind: str, payloads: "dict[str, str]", *worker: object
) -> "tuple[int, dict[str, str], str]":
    """Returns the exit code, what was found of each check, and all that was printed."""
    options = []
    for name, text in payloads.items():
        (folder / name).write_text(text)
        options.append(f"--{name}={folder / name}")
    command = [sys.executable, "-m", "launchpad_lite.search", "check-worker", f"--kind={kind}"]
    command += ["--patience-s=30", *options, "--", *map(str, worker)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    found = {}
    for line in done.stdout.splitlines():
        for word in ("ok", "failed", "not checked"):
            if line.startswith(f"{word} "):
                found[line.removeprefix(word).split()[0].rstrip(":")] = word
    return done.returncode, found, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("", []),
        ("stops", ["stops"]),  # it goes on
        ("token", ["failures"]),  # no failure without its token counts
    ],
)
def test_what_a_worker_does_wrong_is_named(tmp_path: Path, fault: str, failed: "list[str]") -> None:
    worker = (sys.executable, "-m", "tests.launchpad_lite.search.grpc_worker", fault)
    code, found, text = check(tmp_path, "words", _PAYLOADS, *worker)
    assert set(found) == set(_CHECKS), text
    assert [each for each, word in found.items() if word != "ok"] == failed, text
    assert code == bool(failed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_no_payload_is_given_for_is_not_checked(tmp_path: Path) -> None:
    worker = (sys.executable, "-m", "tests.launchpad_lite.search.grpc_worker", "vanishes")
    code, found, text = check(tmp_path, "words", {}, *worker)
    missing = {each for each, word in found.items() if word == "not checked"}
    assert missing == {"tasks", "failures", "leases", "stops", "restarts"}, text
    assert {each for each, word in found.items() if word == "failed"} == {"leaving"}
    assert code == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_worker_in_cpp_passes(tmp_path: Path) -> None:
    wanted = ["g++", "protoc", "pkg-config"]
    if not all(map(shutil.which, wanted)) or subprocess.run(["pkg-config", "grpc++"]).returncode:
        pytest.skip("needs the Debian packages g++, libgrpc++-dev, libssl-dev, protobuf-compiler")
    subprocess.run([ROOT / "examples" / "search_worker_cpp" / "build.sh", tmp_path], check=True)
    payloads = {"payload": "1.5 2", "long-payload": "1.5 2 5", "bad-payload": "nonsense"}
    code, found, text = check(tmp_path, "cpp", payloads, tmp_path / "worker")
    assert (code, found) == (0, dict.fromkeys(_CHECKS, "ok")), text
