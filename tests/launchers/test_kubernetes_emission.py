"""What `emit kubernetes` writes, and mistakes that are told before a cluster is asked.

Nothing here has a cluster: that emitted objects run is shown in `test_kubernetes`.
"""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.kubernetes import PodOptions
from launchpad_lite.errors import ProgramError
from launchpad_lite.launching import LaunchOptions, get_launcher

pytest.importorskip("kubernetes")

_IMAGE = "localhost/research:1"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")


def small_program() -> lp.Program:
    program = lp.Program("small")
    for group in ("actor", "learner"):
        with program.group(group):
            program.add_node(lp.CourierNode(dict))
    return program


def emit(folder: Path, **options: Any) -> dict[str, Any]:
    """Writes the files of a small program; returns the objects among them, in order."""
    launcher = get_launcher("kubernetes", {"image": _IMAGE, "name": "by-hand", **options})
    files = launcher.emit(lp.plan(small_program(), launcher), LaunchOptions())
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content)
    return {name: json.loads(files[name]) for name in sorted(files) if name.endswith(".json")}


# What pods run first


@pytest.mark.parametrize(("file", "code"), [("begin.py", 143), ("pod.py", 75)])
def test_the_first_process_of_a_pod_hears_its_notice_while_it_imports(
    tmp_path: Path, file: str, code: int
) -> None:
    secrets = [each for each in emit(tmp_path).values() if each["kind"] == "Secret"]
    (text,) = (each["data"][file] for each in secrets if file in each["data"])
    (tmp_path / file).write_bytes(base64.b64decode(text))
    (tmp_path / "subprocess.py").write_text(
        "import time\nprint('here', flush=True)\nwhile True: time.sleep(0.01)"
    )
    command = [sys.executable, str(tmp_path / file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        process.terminate()
        # By itself: what nobody handles does not end process 1.
        assert process.wait(20) == code


# Mistakes


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ProgramError) as caught:
        lp.launch(
            small_program(),
            "kubernetes",
            resources={"actor": {"gpu": 0.5}},
            pods={"actors": PodOptions(image=_IMAGE), "learner": {"image": _IMAGE}},
        )
    text = str(caught.value)
    assert "pods= of an unknown group 'actors'; the groups are: actor, learner" in text
    assert "no image for the pods of the supervisor, group 'actor'" in text
    assert re.search("actor.*gpu.*0.5", text), text


def test_options_of_pods_come_from_a_file_and_its_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "pods.toml"
    file.write_text(
        f"""
        ["*"]
        image = "{_IMAGE}"
        node_selector = {{ zone = "a" }}
        [actor]
        node_selector = {{ gpu = "a100" }}
        priority_class = "high"
        [supervisor]
        env = {{ GREETING = "hello" }}
        """
    )
    jobs = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in emit(tmp_path, image=None, pods=file).values()
        if each["kind"] == "Job"
    }
    assert {name: spec["nodeSelector"] for name, spec in jobs.items()} == {
        "by-hand": {"zone": "a"},
        "by-hand-actor": {"zone": "a", "gpu": "a100"},
        "by-hand-learner": {"zone": "a"},
    }
    assert jobs["by-hand-actor"]["priorityClassName"] == "high"
    env = jobs["by-hand"]["containers"][0]["env"]
    assert {"name": "GREETING", "value": "hello"} in env

    file.write_text('[actor]\nimgae = "a"\n[learner]\npython = 3\n')
    with pytest.raises((TypeError, ValueError)) as caught:
        get_launcher("kubernetes", {"pods": file})
    words = "pods['actor']: unknown pod option 'imgae' (did you mean 'image'?); known are image,"
    assert words in str(caught.value)
    assert "pods['learner']: python: a text, not 3" in str(caught.value)


# The script


class Script:
    """The emitted script, with what it asks of kubectl."""

    def __init__(self, folder: Path, *failing: str) -> None:
        """Runs it.

        Args:
            folder: Where it is.
            *failing: Ends of the commands that fail.
        """
        script = folder / "create.sh"
        subprocess.run(["sh", "-n", script], check=True)
        programs = folder / "bin"
        programs.mkdir()
        kubectl = programs / "kubectl"
        fails = "".join(f"case \"$*\" in *'{each}') exit 1;; esac\n" for each in failing)
        kubectl.write_text(
            f"""#!/bin/sh
echo "$@" >> {folder}/calls
{fails}
case "$*" in
    'patch --local'*) cat "$4";;
    *' -f -'*jsonpath*) cat > {folder}/root; printf 123-456;;
    *' -f -') cat >> {folder}/made;;
esac
"""
        )
        kubectl.chmod(0o755)
        env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        self.code = subprocess.run(["sh", script], env=env, cwd="/").returncode
        self.calls = (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("queue", [False, True])
def test_the_emitted_script_creates_all_objects_and_makes_them_belong_to_the_first(
    tmp_path: Path, queue: bool
) -> None:
    objects = emit(tmp_path, namespace="lab", queue="research" if queue else None)
    script = Script(tmp_path)
    assert script.code == 0
    files = [*objects]
    jobs = [name for name in files[:-1] if objects[name]["kind"] == "Job"]
    others = script.calls[2:]
    # It must not begin without the others.
    suspension = '--type=merge -p {"spec":{"suspend":true}} -o json'
    assert sorted(script.calls[:2]) == [
        "create --namespace=lab -f - -o jsonpath={.metadata.uid}",
        f"patch --local -f {files[-1]} {suspension}",
    ]
    if not queue:  # which starts it by itself
        resumption = '--type=merge -p {"spec":{"suspend":false}}'
        # Each takes two calls; pods come last.
        number = 2 * (len(files) - 1 - len(jobs))
        assert others.pop(number) == f"patch --namespace=lab Job by-hand {resumption}"
    assert sorted(others)[: len(files) - 1] == ["create --namespace=lab -f -"] * (len(files) - 1)
    patches = [line for line in others if line.startswith("patch")]
    assert len(patches) == len(files) - 1 == len(others) // 2
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "by-hand", "uid": "123-456"}
    assert files[-1 - len(jobs) : -1] == jobs
    for line, name in zip(patches, files, strict=False):
        words = line.removesuffix(" -o json").split(" -p ")
        assert words[0] == f"patch --local -f {name} --type=merge"
        assert json.loads(words[1]) == {"metadata": {"ownerReferences": [owner]}}


@pytest.mark.parametrize("failing", ["-f -", '{"spec":{"suspend":false}}'])
def test_the_emitted_script_removes_what_it_created_when_it_breaks_off(
    tmp_path: Path, failing: str
) -> None:
    emit(tmp_path)
    script = Script(tmp_path, failing)
    assert script.code == 1
    assert script.calls[-1] == "delete Job by-hand --wait=false"


def test_the_emitted_script_leaves_alone_what_it_did_not_create(tmp_path: Path) -> None:
    emit(tmp_path)
    script = Script(tmp_path, "jsonpath={.metadata.uid}")
    assert script.code == 1
    assert not [each for each in script.calls if each.startswith("delete")]
