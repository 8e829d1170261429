"""How a launcher of pods creates a run: all of it, or nothing; and what it refuses before."""

import base64
import json
import re
import signal
import socket
import socketserver
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.kubernetes import KubernetesLauncher, WorkStore, WorkVolume
from launchers.kubernetes._client import Api
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import LaunchOptions
from launchpad_lite.launching.launch import SIGNALS
from launchpad_lite.testing import poll_until

pytest.importorskip("kubernetes.client")
pytest.importorskip("kubernetes_validate")

from tests.beds.kubernetes.controllers import GarbageCollector, Loop
from tests.beds.kubernetes.kubeconfig import write_config
from tests.beds.kubernetes.server import ApiServer
from tests.beds.kubernetes.store import ApiError, Store
from tests.launchers.kubernetes_access import (
    HastyLauncher,
    disturb,
    documented_role,
    record,
    serving,
)

LOST = ConnectionResetError("the answer was lost")


class Node:
    def run(self) -> None: ...


def launcher(**options: Any) -> KubernetesLauncher:
    return HastyLauncher("an-image", **{"name": "demo", "detach": True, **options})


def plan_of(chosen: KubernetesLauncher, restart: Any = None) -> lp.launching.LaunchPlan:
    program = lp.Program("small")
    for label in "ab":
        program.add_node(lp.CourierNode(Node), label=label)
    return lp.plan(program, chosen, restart=restart)


def create(chosen: KubernetesLauncher) -> None:
    """Creates a run of two groups."""
    chosen.start(plan_of(chosen), LaunchOptions())


def emit(chosen: KubernetesLauncher, **options: Any) -> dict[str, bytes]:
    """Returns its files by what they are: `job-demo`."""
    files = chosen.emit(plan_of(chosen), LaunchOptions(**options))
    return {
        name.partition("-")[2].removesuffix(".json"): content for name, content in files.items()
    }


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A server that keeps what is created, and removes what belonged to what is gone."""
    store = Store()
    api = ApiServer(store, "team", lambda *_: pytest.fail("no logs"))
    api.tokens["a-token"] = documented_role()
    loop = Loop(store, [GarbageCollector(store).run])
    monkeypatch.setenv("KUBECONFIG", str(write_config(tmp_path, api.url, namespace="team")))
    yield api
    loop.close()
    api.close()
    assert not loop.errors


def left(cluster: ApiServer) -> list[str]:
    return [f"{kind}/{each['metadata']['name']}" for kind, each in cluster.store.all()]


def nothing_is_left(cluster: ApiServer) -> bool:
    return bool(poll_until(lambda: not left(cluster), must=False))


# What the server is asked before


def refuse(
    monkeypatch: pytest.MonkeyPatch, code: int, message: str, *causes: tuple[str, str], **where: str
) -> None:
    """Has the server refuse whatever is tried of these names, as a real one does.

    Args:
        monkeypatch: Of the test.
        code: Of HTTP.
        message: For people.
        *causes: Fields, and what is wrong with each.
        **where: `kind` and `name` of the objects that are refused; by default all.
    """
    details = {"causes": [{"field": field, "message": what} for field, what in causes]}
    admit = ApiServer.admit

    def admit_some(api: ApiServer, resource: str, item: Any, *, is_dry: bool = False) -> Any:
        called = {"kind": item["kind"], "name": item["metadata"]["name"]}
        if is_dry and where.items() <= called.items():
            raise ApiError(code, "Invalid", message, details)
        return admit(api, resource, item, is_dry=is_dry)

    monkeypatch.setattr(ApiServer, "admit", admit_some)


def test_all_that_the_server_refuses_is_told_at_once_and_nothing_is_created(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "spec.template.spec"
    causes = (
        (f"{where}.priorityClassName", 'Invalid value: "low": no such class'),
        (f"{where}.containers[0].volumeMounts[0].name", 'Not found: "tpm"'),
        ("spec.completions", "Invalid value: 0"),
    )
    message = 'Job.batch "demo-b" is invalid: [...]'
    refuse(monkeypatch, 422, message, *causes, kind="Job", name="demo-b")
    seen = disturb(monkeypatch)
    typo = {"spec": {"hostNetwrok": True}}
    pods = {"supervisor": {"patch": typo}, "b": {"priority_class": "low"}}
    with pytest.raises(LaunchError) as caught:
        create(launcher(pods=pods))
    head, *told = str(caught.value).split("\n  ")
    assert head == f"the API server {cluster.url} refuses the run, nothing was created:"
    assert told[0].startswith('Job of the supervisor: Job in version "v1" cannot be handled')
    assert "hostNetwrok" in told[0]
    assert told[0].endswith(" (option patch)")
    options = [" (option priority_class)", "", ""]
    assert told[1:] == [
        f"Job of group 'b': {field}: {what}{option}"
        for (field, what), option in zip(causes, options, strict=True)
    ]
    assert not [each for each in seen if each.startswith("POST")]
    assert not left(cluster)


def test_jobs_that_a_jobset_is_to_make_are_judged_too(cluster: ApiServer) -> None:
    cluster.tokens["a-token"] = None
    typo = {"patch": {"spec": {"hostNetwrok": True}}, "node_selector": {"a": "b"}}
    with pytest.raises(LaunchError, match=r"Job of group 'b': .*hostNetwrok.* \(option patch\)$"):
        create(launcher(jobset=True, pods={"b": typo}))
    assert not left(cluster)


def test_keys_and_work_are_not_sent_to_be_judged(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearse, sent = Api.rehearse, list[Any]()

    def note(api: Api, obj: Any) -> None:
        sent.append(obj)
        rehearse(api, obj)

    monkeypatch.setattr(Api, "rehearse", note)
    create(launcher())
    secrets = [each["data"] for each in sent if each["kind"] == "Secret"]
    assert secrets == [{}] * len(cluster.store.items("secrets"))
    assert len(sent) == len(left(cluster))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (400, 'admission webhook "policy" does not support dry run'),
        (400, 'admission webhook "policy" denied the request: Secret "demo-trust" not found'),
        (403, 'jobs.batch is forbidden: User "me" cannot create resource "jobs" in API group'),
        (404, "the server could not find the requested resource"),
        (409, 'jobs.batch "demo" already exists'),
        (500, "Internal error occurred: the webhook is away"),
    ],
)
def test_what_cannot_be_judged_before_is_left_to_the_creation(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    refuse(monkeypatch, code, message)
    create(launcher())
    assert "jobs/demo" in left(cluster)


@pytest.mark.parametrize("code", [400, 403])
def test_a_policy_of_the_cluster_is_told_before_anything_is_created(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    message = 'admission webhook "policy" denied the request: a team label is required'
    refuse(monkeypatch, code, message, kind="Service")
    with pytest.raises(LaunchError) as caught:
        create(launcher())
    whose = ("the supervisor", "group 'a'", "group 'b'")
    assert str(caught.value).split("\n  ")[1:] == [f"Service of {who}: {message}" for who in whose]
    assert not left(cluster)


# Creation


def test_what_is_created_is_what_is_emitted_and_belongs_to_the_first_object(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted = [json.loads(each) for name, each in emit(launcher()).items() if "-demo" in name]
    made = record(monkeypatch)
    create(launcher())
    root = {"apiVersion": "batch/v1", "kind": "Job", "name": "demo"}
    for each in made[1:]:
        (owner,) = each["metadata"].pop("ownerReferences")
        assert root.items() <= owner.items()
    for each in (*made, *emitted):
        if each["kind"] == "Secret":  # certificates and code are those of one launch
            each["data"] = sorted(each["data"])
        each.get("spec", {}).pop("suspend", None)

    def by_name(objects: list[Any]) -> dict[tuple[str, str], Any]:
        return {(each["kind"], each["metadata"]["name"]): each for each in objects}

    assert by_name(made) == by_name(emitted)


def test_a_launch_with_the_documented_rights_goes_on_though_each_answer_is_lost_once(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after() -> None:
        if seen[-1].startswith(("POST", "PATCH")) and seen.count(seen[-1]) == 1:
            raise LOST

    seen = disturb(monkeypatch, after=after)
    create(launcher())
    posts = [each.removeprefix("POST ").replace(" ", "/") for each in seen if "POST" in each]
    assert sorted(posts) == sorted(left(cluster) * 2)
    root = cluster.store.get("jobs", "team", "demo")
    assert root["spec"]["suspend"] is False


def test_no_pods_of_nodes_are_made_before_their_supervisor_begins(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def before() -> None:
        if seen[-1].startswith("POST jobs demo-"):
            begun.append(not cluster.store.get("jobs", "team", "demo")["spec"]["suspend"])
        else:
            assert not begun, f"{seen[-1]}: it may be what the supervisor needs"

    seen = disturb(monkeypatch, before=before)
    create(launcher())
    assert begun == [True, True]


def test_an_older_run_of_the_same_name_is_left_alone(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(launcher())
    before = left(cluster)

    def fail() -> None:
        if seen[-1] == "POST jobs demo" and seen.count("POST jobs demo") == 1:
            raise LOST

    seen = disturb(monkeypatch, before=fail)
    with pytest.raises(LaunchError, match="already exists"):
        create(launcher())
    assert seen.count("POST jobs demo") == 2
    assert not [each for each in seen if each.startswith("DELETE")]
    assert left(cluster) == before


@pytest.mark.parametrize("place", ["POST jobs demo", "POST secrets demo-trust", "PATCH jobs demo"])
@pytest.mark.parametrize("detach", [True, False])
def test_a_creation_that_is_interrupted_leaves_nothing(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, detach: bool
) -> None:
    def after() -> None:
        if seen[-1] == place and seen.count(place) == 1:
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would be the end"
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("LAUNCHPAD_LOGGING_DIR", str(tmp_path / "logs"))
    seen = disturb(monkeypatch, after=after)
    with pytest.raises(SystemExit) as caught, SIGNALS.leaving():
        create(launcher(detach=detach))
    assert caught.value.code == 143
    assert nothing_is_left(cluster)


def test_a_first_object_whose_creation_was_never_answered_is_removed(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after() -> None:
        if seen[-1] == "POST jobs demo":
            raise LOST

    seen = disturb(monkeypatch, after=after)
    with pytest.raises(LaunchError, match="does not answer: the answer was lost") as caught:
        create(launcher())
    assert nothing_is_left(cluster)
    assert "kubectl" not in str(caught.value)


def test_a_first_object_that_is_there_only_after_the_interrupt_is_removed(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, kept = "demo", list[Any]()

    def before() -> None:
        if seen[-1].startswith("GET jobs") and seen.count(seen[-1]) == 2:
            cluster.store.create("jobs", kept[0])

    def after() -> None:
        if seen[-1] == "POST jobs demo":
            kept.append(cluster.store.get("jobs", "team", job))
            cluster.store.delete("jobs", "team", job)
            raise KeyboardInterrupt

    seen = disturb(monkeypatch, before=before, after=after)
    with pytest.raises(KeyboardInterrupt):
        create(launcher())
    assert seen.count("GET jobs demo") == 2
    assert nothing_is_left(cluster)


def test_what_cannot_be_removed_is_named_beside_the_first_error_and_the_work_is_taken_back(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch, volume: WorkVolume
) -> None:
    cluster.tokens["a-token"] = documented_role() - {("create", "secrets")}

    def before() -> None:
        if seen[-1].startswith("DELETE"):
            raise LOST

    seen = disturb(monkeypatch, before=before)
    refused = "we may not create secrets in namespace 'team'"
    with pytest.raises(LaunchError, match=refused) as caught:
        create(launcher(work=volume))
    rule = re.search(r"must have the rule (\{.*?\})", str(caught.value))
    assert rule
    assert json.loads(rule[1]) == {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}
    assert "; what was created remains (cannot delete Job demo: " in str(caught.value)
    assert str(caught.value).endswith("Remove it: kubectl delete job demo -n team")
    assert files_in(volume) == []


def test_what_may_have_been_created_is_named_when_nobody_can_be_asked(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after() -> None:
        if "POST jobs demo" in seen:
            raise LOST

    seen = disturb(monkeypatch, after=after)
    with pytest.raises(LaunchError, match="; what was created may remain") as caught:
        create(launcher())
    assert "kubectl delete job demo -n team" in str(caught.value)


def test_what_an_interrupted_launch_cannot_remove_is_named(
    cluster: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def before() -> None:
        if seen[-1] in ("POST secrets demo-trust", "DELETE jobs demo"):
            raise KeyboardInterrupt

    seen = disturb(monkeypatch, before=before)
    with pytest.raises(KeyboardInterrupt):
        create(launcher())
    assert "kubectl delete job demo -n team" in capsys.readouterr().err
    assert "jobs/demo" in left(cluster)


@pytest.mark.parametrize("restart", [None, "on_failure"])
def test_a_run_is_found_again_by_a_launcher_that_was_made_by_hand(
    cluster: ApiServer, restart: str | None
) -> None:
    chosen = launcher()
    chosen.start(plan_of(chosen, restart), LaunchOptions())
    program = launcher().attach("demo")
    assert program.plan.launcher == "HastyLauncher"
    # So it is known whether the loss of the supervisor is the end.
    for each in program.plan.executables:
        assert each.restart.outlives_host is (restart is not None)
    program.stop()
    assert nothing_is_left(cluster)


# Options


@pytest.mark.parametrize(
    "name", ["schedule_s", "silence_s", "launcher_silence_s", "ttl_s", "max_run_s"]
)
@pytest.mark.parametrize("value", ["5", float("nan"), float("inf"), -1, True, 1 << 40])
def test_seconds_that_cannot_be_are_refused_at_once(name: str, value: Any) -> None:
    wants_for_ever = name == "schedule_s" and value == float("inf")
    is_long = value == 1 << 40 and name not in ("ttl_s", "max_run_s")
    if wants_for_ever or is_long:
        launcher(**{name: value})
    else:
        with pytest.raises(ValueError, match=f"^{name} is a (whole )?number of seconds, at least"):
            launcher(**{name: value})


def test_an_endless_notice_is_json_as_all_others_read_it() -> None:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    files = emit(launcher(), notice_s=float("inf"))
    root = json.loads(files["job-demo"], parse_constant=refuse)
    plan = json.loads(root["metadata"]["annotations"]["launchpad-lite/plan"], parse_constant=refuse)
    assert plan["notice_s"] == -1


# The work beside the objects


@pytest.fixture
def volume(tmp_path: Path) -> WorkVolume:
    return WorkVolume(tmp_path / "shared", {"persistentVolumeClaim": {"claimName": "shared"}})


def files_in(volume: WorkVolume) -> list[str]:
    folder = Path(volume.folder)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_runs_of_one_name_do_not_touch_the_work_of_each_other(
    cluster: ApiServer, volume: WorkVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for _ in range(2):
        files = emit(launcher(work=volume))
        (order,) = (json.loads(each) for name, each in files.items() if name.endswith("-order"))
        source = json.loads(base64.b64decode(order["data"]["order.json"]))["source"]
        found.append("/".join(source).removeprefix("/launchpad/work/"))
    assert files_in(volume) == ["demo", *sorted({*found})]
    assert len(files_in(volume)) == 3

    def before() -> None:
        if seen[-1].startswith("POST secrets"):
            assert len(files_in(volume)) == 4
            raise KeyboardInterrupt

    seen = disturb(monkeypatch, before=before)
    with pytest.raises(KeyboardInterrupt):
        create(launcher(work=volume))
    assert files_in(volume) == ["demo", *sorted(found)], "others' work is taken back"


def test_work_that_is_written_by_half_is_removed(
    volume: WorkVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, blob: bytes) -> int:
        with path.open("wb") as file:
            file.write(blob[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    full = "cannot be written to its volume.*No space left"
    with pytest.raises(LaunchError, match=full) as caught:
        emit(launcher(work=volume))
    assert "still there" not in str(caught.value)
    assert files_in(volume) == []


@pytest.mark.parametrize("source", ["claim", {}, {"nfs": {"server": {1}}}])
def test_a_volume_for_work_that_is_none_is_refused_at_once(source: Any) -> None:
    with pytest.raises(ValueError, match=r"source|JSON"):
        WorkVolume("/shared", source)


def test_a_folder_that_is_none_is_no_place_for_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="Not a directory") as caught:
        emit(launcher(work=WorkVolume(tmp_path / "file", {"emptyDir": {}})))
    assert "still there" not in str(caught.value)


ANSWERS = {
    "/forbidden": b"HTTP/1.1 403 geheim\r\n\r\n",
    "/strange": b"geheim\r\n\r\n",
    "/silent": b"",
}


class StrangeStore(socketserver.BaseRequestHandler):
    """Says something strange to whoever sends it something."""

    def handle(self) -> None:
        path = self.request.recv(1 << 16).split()[1].decode()
        self.request.sendall(ANSWERS[path.partition("?")[0]])
        self.request.shutdown(socket.SHUT_WR)
        while self.request.recv(1 << 16):
            pass


@pytest.fixture
def store() -> Iterator[str]:
    """The address of a store."""
    with serving(socketserver.TCPServer(("127.0.0.1", 0), StrangeStore)) as address:
        yield f"http://{address}"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("STORE/forbidden?geheim", "it answers HTTP 403"),
        ("STORE/strange?geheim", "BadStatusLine; is put= of WorkStore the URL of"),
        ("STORE/silent?geheim", "closed connection without response"),
        ("http://127.0.0.1:9/?geheim", "Connection refused"),
        ("http://[geheim", "ValueError; is put="),
        ("http://here:geheim/", "InvalidURL; is put="),
        ("http://here/geh\u00e9im?geheim", "UnicodeEncodeError; is put="),
        ("http:///geheim", "is put="),
    ],
)
def test_a_store_that_does_not_take_work_is_told_without_its_url(
    store: str, url: str, expected: str
) -> None:
    place = WorkStore(url.replace("STORE", store), "http://here")
    refused = "the work cannot be sent to the object store: "
    with pytest.raises(LaunchError, match=refused) as caught:
        emit(launcher(work=place))
    assert expected in str(caught.value)
    assert "geheim" not in "".join(traceback.format_exception(caught.value))
    assert "geheim" not in repr(place)


def test_a_store_without_a_url_for_http_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="http:// or https://") as caught:
        WorkStore("s3://geheim", "http://here")
    assert "geheim" not in str(caught.value)
