"""Pods, Jobs and events as API servers have them, and a run of two actors and a learner."""

from typing import Any

from launchers.kubernetes._client import ApiError
from launchers.kubernetes._names import Names

NAMES = Names.of("demo", ["actor", "learner"], "demo-x2x4z")
RUN = NAMES.run


def pod(
    host: str = f"{RUN}-actor-0",
    *,
    phase: str = "Pending",
    state: dict[str, Any] | None = None,
    conditions: tuple[dict[str, Any], ...] = (),
    container: str = "node",
    memory: str | None = "64Mi",
    uid: str | None = None,
    deleted: bool = False,
    created: str = "2026-01-01T00:00:00Z",
    **status: Any,
) -> dict[str, Any]:
    role = "supervisor" if container == "supervisor" else "node"
    limits = {"memory": memory} if memory else {}
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"{host}-abcde",
            "uid": uid or host,
            "labels": {"launchpad-lite/run": RUN, "launchpad-lite/role": role},
            "creationTimestamp": created,
            **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}),
        },
        "spec": {
            "hostname": host,
            "nodeName": "machine-1",
            "containers": [{"name": container, "resources": {"limits": limits}}],
        },
        "status": {
            "phase": phase,
            "conditions": list(conditions),
            "containerStatuses": [{"name": container, "state": state or {}}],
            **status,
        },
    }


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def terminated(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def condition(
    kind: str, status: str, reason: str, message: str = "", **more: str
) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, **more}


def running(host: str = f"{RUN}-actor-0", **fields: Any) -> dict[str, Any]:
    return pod(host, phase="Running", state={"running": {}}, **fields)


def ended(code: int, reason: str = "Error", message: str = "", **fields: Any) -> dict[str, Any]:
    return pod(phase="Failed", state=terminated(code, reason, message), **fields)


def disrupted(why: str, text: str = "", **fields: Any) -> dict[str, Any]:
    return pod(conditions=(condition("DisruptionTarget", "True", why, text),), **fields)


def ready(status: str, since: str) -> dict[str, Any]:
    """Returns a pod that runs, whose machine has said since then how it is."""
    return running(conditions=(condition("Ready", status, "", lastTransitionTime=since),))


def event(about: str, reason: str, message: str, name: str = "e") -> dict[str, Any]:
    return {
        "kind": "Event",
        "metadata": {"name": name, "uid": name},
        "involvedObject": {"name": about},
        "reason": reason,
        "message": message,
    }


def job(name: str = f"{RUN}-actor", *conditions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "kind": "Job",
        "metadata": {"name": name, "uid": name, "labels": fields.pop("labels", {})},
        "spec": {"parallelism": 2, **fields.pop("spec", {})},
        "status": {"conditions": list(conditions), **fields},
    }


def refused(status: int | None = 403, *, is_final: bool = True) -> ApiError:
    """Returns what a request raises; not final: as of a server that has just begun."""
    error = ApiError("we may not" if is_final else "it has just begun", status)
    error.is_final = is_final
    return error


UNSCHEDULABLE = condition("PodScheduled", "False", "Unschedulable", "2 Insufficient gpu.")
QUEUED = job(spec={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "team"})
