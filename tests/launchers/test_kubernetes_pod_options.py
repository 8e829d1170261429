"""Options of pods: what users may write, and how pods follow it."""

import json
import math
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.kubernetes import KubernetesLauncher, PodOptions
from launchpad_lite.launching import LaunchOptions


def patched(patch: Any, **options: Any) -> dict[str, Any]:
    """Returns the template of pods that are patched."""
    pods = {"actor": PodOptions(patch=patch, **options)}
    launcher = KubernetesLauncher("i", name="demo", pods=pods)
    program = lp.Program("program")
    program.add_node(lp.CourierNode(dict), label="actor")
    files = launcher.emit(lp.plan(program, launcher), LaunchOptions())
    (job,) = (json.loads(files[name]) for name in files if name.endswith("-job-demo-actor.json"))
    template: dict[str, Any] = job["spec"]["template"]
    return template


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"img": "x"}, r"'img' \(did you mean 'image'\?\); known are image, pull_policy"),
        ({"image": 7}, "image: a text, not 7"),
        ({"pull_secrets": "registry"}, "pull_secrets: a list, not 'registry'"),
        ({"node_selector": ["gpu"]}, "node_selector: a dict"),
        ({"tolerations": {"key": "a"}}, "tolerations: a list"),
        ({"env": {"A": {1}}}, "env: it cannot be written as JSON: .*set"),
        ({"env": {"LAUNCHPAD_WAIT_S": "1"}}, "names that begin with LAUNCHPAD_"),
        ({"run_as_user": -1}, "run_as_user: the number of a user"),
        ({"run_as_user": True}, "run_as_user: the number of a user"),
        ({"volumes": []}, "volumes: a dict, not"),
        ({"volumes": {"trust": {"emptyDir": {}, "mount": "/d"}}}, "the launcher's own"),
        ({"volumes": {"d": {"emptyDir": {}}}}, r"volumes\['d'\]: mount: an absolute path"),
        ({"volumes": {"d": {"emptyDir": {}, "mount": "d"}}}, "mount: an absolute path"),
        ({"volumes": {"d": {"emptyDir": {}, "mount": "/launchpad/d"}}}, "/launchpad is"),
        ({"volumes": {"d": {"mount": "/d"}}}, "exactly one source"),
        ({"volumes": {"d": {"emptyDir": {}, "secret": {}, "mount": "/d"}}}, "exactly one source"),
        ({"volumes": {"d": {"emptyDir": {1}, "mount": "/d"}}}, "cannot be written as JSON"),
        ({"volumes": {"d": "claim"}}, r"volumes\['d'\]: expected Volume or a dict, got 'claim'"),
        ({"patch": []}, "patch: a dict"),
        ({"patch": {"containers": []}}, "a pod template has metadata and spec, not 'containers'"),
        ({"patch": {"spec": []}}, "patch.spec: a dict, not"),
        ({"patch": {"spec": {"containers": {}}}}, "patch.spec.containers: a list of dicts"),
        ({"patch": {"spec": {"containers": ["node"]}}}, r"patch.spec.containers\[0\]: a dict with"),
        (
            {"patch": {"spec": {"containers": [{"name": "node", "env": [{"value": "1"}]}]}}},
            r"patch.spec.containers\[node\].env\[0\]: a dict with 'name'",
        ),
        (
            {"patch": {"spec": {"volumes": [{"name": "tmp", "$patch": "replace"}]}}},
            r"patch.spec.volumes\[tmp\].\$patch: 'delete', not 'replace'",
        ),
        ({"patch": {"spec": {"priority": {1, 2}}}}, "patch: it cannot be written as JSON: .*set"),
        ({"patch": {"spec": {"priority": math.nan}}}, "patch: it cannot be written as JSON"),
    ],
)
def test_wrong_options_are_told_with_where_they_stand(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PodOptions.of(given)


def test_all_wrong_options_are_told_together() -> None:
    with pytest.raises(ValueError, match=r"image: .*; env: .*; patch\.spec: "):
        PodOptions.of({"image": 1, "env": ["A"], "patch": {"spec": 1}})
    with pytest.raises(TypeError, match="expected PodOptions or a dict, got 'python:3'"):
        PodOptions.of("python:3")  # type: ignore[arg-type]


def test_options_of_a_group_go_over_those_for_all() -> None:
    base = PodOptions(
        image="base",
        python="python3.12",
        pull_secrets=["one"],
        env={"A": "1", "B": "1"},
        patch={"spec": {"containers": [{"name": "node", "tty": True}], "priority": 1}},
    )
    group_options = PodOptions.of(
        {
            "image": "own",
            "env": {"B": "2"},
            "patch": {"spec": {"containers": [{"name": "node", "stdin": True}], "priority": None}},
        }
    )
    assert group_options.over(base) == PodOptions(
        image="own",
        python="python3.12",
        pull_secrets=["one"],
        env={"A": "1", "B": "2"},
        patch={
            "spec": {"containers": [{"name": "node", "tty": True, "stdin": True}], "priority": None}
        },
    )
    assert PodOptions().over(base) == base
    assert base.over(PodOptions()) == base


def test_a_patch_changes_one_named_thing_and_leaves_the_others() -> None:
    before = patched({})
    after = patched(
        {
            "spec": {
                "containers": [
                    {
                        "name": "node",
                        "env": [{"name": "HOME", "value": "/home/me"}],
                        "volumeMounts": [{"mountPath": "/dev/shm", "$patch": "delete"}],
                        "ports": [{"containerPort": 4251, "name": "courier"}],
                    },
                    {"name": "sidecar", "image": "s"},
                ],
                "initContainers": [{"name": "first", "image": "f"}],
                "volumes": [
                    {"name": "shm", "$patch": "delete"},
                    {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
                ],
            }
        }
    )
    node, sidecar = after["spec"]["containers"]
    (node_before,) = before["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in node["env"]}
    assert env["HOME"] == "/home/me"
    assert {*env} == {each["name"] for each in node_before["env"]}
    assert [each["mountPath"] for each in node["volumeMounts"]] == ["/tmp", "/launchpad/trust"]
    assert node["ports"] == [{"name": "courier", "containerPort": 4251, "protocol": "TCP"}]
    assert node["command"] == node_before["command"]
    assert sidecar == {"name": "sidecar", "image": "s"}
    assert after["spec"]["initContainers"] == [{"name": "first", "image": "f"}]
    assert [each["name"] for each in after["spec"]["volumes"]] == ["tmp", "trust"]
    assert after["spec"]["volumes"][0] == {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}
    assert patched({}) == before


def test_a_patch_removes_with_none_and_replaces_other_lists() -> None:
    pod = patched(
        {
            "spec": {
                "securityContext": {"seccompProfile": None, "fsGroup": 7},
                "enableServiceLinks": None,
                "tolerations": [{"operator": "Exists"}],
            }
        },
        tolerations=[{"key": "gpu"}],
    )
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert "enableServiceLinks" not in pod["spec"]
    context = pod["spec"]["securityContext"]
    assert "seccompProfile" not in context
    assert context["fsGroup"] == 7
    assert context["runAsUser"] == 65532


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"metadata": {"labels": None}}, "labels: 'launchpad-lite/run' is the launcher's own"),
        ({"spec": {"restartPolicy": "Always"}}, "patch.spec.restartPolicy: .* stays 'Never'"),
        ({"spec": {"hostname": "h"}}, "patch.spec.hostname: .* is not set"),
        ({"spec": {"subdomain": None}}, "patch.spec.subdomain: .* stays 'demo-actor'"),
        (
            {"spec": {"containers": [{"name": "node", "$patch": "delete"}]}},
            "the container 'node' is the launcher's own",
        ),
        (
            {"spec": {"containers": [{"name": "node", "env": None}]}},
            r"containers\[node\].env: LAUNCHPAD_SUPERVISOR is the launcher's own",
        ),
        ({"spec": {"tolerations": "x"}}, "patch.spec.tolerations: a list, not 'x'"),
        ({"spec": {"securityContext": 7}}, "patch.spec.securityContext: a dict, not 7"),
        ({"spec": {"subdomain": {"a": 1}}}, "patch.spec.subdomain: a value like 'demo-actor'"),
    ],
)
def test_a_patch_cannot_take_what_the_launcher_needs(patch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patched(patch, tolerations=[{"key": "gpu"}])


def test_root_is_root_only_when_asked_for() -> None:
    context = patched({}, run_as_user=0)["spec"]["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (False, 0)
    context = patched({}, run_as_user=1000)["spec"]["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 1000, 1000)


def test_a_volume_of_the_users_takes_the_place_of_ours() -> None:
    pod = patched({}, volumes={"scratch": {"emptyDir": {}, "mount": "/tmp"}})
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    assert [each["name"] for each in mounts if each["mountPath"] == "/tmp"] == ["scratch"]
    assert [each["name"] for each in pod["spec"]["volumes"]] == ["shm", "trust", "scratch"]
