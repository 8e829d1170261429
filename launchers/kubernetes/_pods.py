"""What users want of pods: a typed override that reaches any field of the pod template. Pure.

What is in it, the API server judges (`admission`).
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launchers.kubernetes._agreed import MOUNTS, NODE, SUPERVISOR
from launchpad_lite.parts.settings import made_from

#: User and group of pods by default: without a name, as in images without a shell.
_NOBODY = 65532
_ENV_PREFIX = "LAUNCHPAD_"
#: Images need not have an entry for the user, and PyTorch often looks for its name.
_ENV = {"HOME": "/tmp", "USER": "launchpad"}  # noqa: S108 - of the pod alone
#: Where pods may write, by volume.
_WRITABLE = {"tmp": "/tmp", "shm": "/dev/shm"}  # noqa: S108 - of the pod alone
_RESERVED_VOLUMES = frozenset(["tmp", "shm", "trust", "order", "work", "launcher"])
#: The type of each option, and its name in messages. The API server checks what is in them.
_SHAPES: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("image", "pull_policy", "service_account", "priority_class", "python"), (str, "a text")
    ),
    **dict.fromkeys(("pull_secrets", "tolerations"), (list | tuple, "a list")),
    **dict.fromkeys(("node_selector", "env", "volumes", "patch"), (Mapping, "a dict")),
}
#: Lists of named things, and the field that names one.
_KEYS = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_DIRECTIVE = "$patch"
#: Of an affinity: its terms without which a pod gets no machine.
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

#: Taints of lost machines, and the seconds that a replaceable pod stays on such a machine (by default
#: 300): by then the supervisor has given the pod up. Other pods stay for the default time: nothing
#: waits for their end, and they would lose much if only the kubelet restarts.
_MACHINE_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_WITHOUT_MACHINE_S = 30


@dataclass(frozen=True)
class Volume:
    """A volume of the cluster in a pod.

    Attributes:
        mount: Absolute path at which the nodes find it.
        source: What it is, by Kubernetes' name for the kind: `{"persistentVolumeClaim":
            {"claimName": "data"}}`.
        read_only: Whether nodes can only read there.
        sub_path: The part of it that is mounted; None: all.
    """

    mount: str
    source: Mapping[str, Any]
    read_only: bool = False
    sub_path: str | None = None

    def __post_init__(self) -> None:
        if mistakes := list(self._mistakes()):
            raise ValueError("; ".join(mistakes))

    @classmethod
    def of(cls, given: "Volume | Mapping[str, Any]") -> "Volume":
        """Takes a volume as users write it: a Volume, or a dict of its source and its fields."""
        if isinstance(given, Volume):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"expected Volume or a dict, got {given!r}")
        own = {each.name for each in dataclasses.fields(cls)} - {"source"}
        source = {key: given[key] for key in given if key not in own}
        settings: dict[str, Any] = {key: given[key] for key in given if key in own}
        return cls(**{"mount": None, **settings}, source=source)

    def _mistakes(self) -> Iterator[str]:
        given: dict[str, Any] = vars(self)  # not all users run mypy
        mount, source = given["mount"], given["source"]
        if not isinstance(mount, str) or not mount.startswith("/") or ":" in mount:
            yield f"mount: an absolute path in the pod like '/data', not {mount!r}"
        elif f"{mount}/".startswith(f"{MOUNTS}/"):
            yield f"mount: {MOUNTS} is the launcher's own; choose another path than {mount}"
        if not isinstance(source, Mapping) or len(source) != 1:
            yield (
                "it has exactly one source, like {'persistentVolumeClaim': {'claimName': 'data'}}, "
                f"not {source!r}"
            )
        yield from _not_json([source, given["read_only"], given["sub_path"]], "volume")


@dataclass(frozen=True)
class PodOptions:
    """How the pods of a group, or of all, differ from the usual ones.

    Usual pods run as a user without a name, have a read-only root file system, no capabilities and no token
    of a service account; they can write to /tmp and /dev/shm.

    Attributes:
        image: Image of the container. It must have Python, of the same minor version as the launching
            process, and launchpad-lite; code that is not installed is sent along.
        pull_policy: `"Always"`, `"IfNotPresent"` or `"Never"`; None: the cluster's default.
        pull_secrets: Names of Secrets with which images are pulled.
        service_account: Account of the pods. They have its token only if `patch` says so:
            `{"spec": {"automountServiceAccountToken": True}}`.
        node_selector: Labels that the cluster's nodes must have.
        tolerations: Taints that are tolerated, as Kubernetes writes them.
        priority_class: Name of the class.
        env: Environment variables: a text, or from where the value comes, like `{"secretKeyRef":
            {"name": "wandb", "key": "token"}}`.
        volumes: Volumes by name: Volume, or dicts as `Volume.of` takes them.
        run_as_user: Numeric id of user and group, also of the group that volumes are given
            (`fsGroup`); 0 is root. None: 65532.
        python: Interpreter in the image; None: python3.
        patch: Any other field of the pod template, like `{"spec": {"runtimeClassName": "gvisor"}}`.
            Dicts are merged. Lists of named things (containers, initContainers, volumes, env,
            volumeMounts by mountPath, ports by containerPort, imagePullSecrets) are merged by name;
            other lists are replaced. None removes a field, and `{"name": ..., "$patch": "delete"}`
            one of the named things. The container of a node is called `node`, that of the
            supervisor `supervisor`; a pod ignores what a patch says of the other one.
    """

    image: str | None = None
    pull_policy: str | None = None
    pull_secrets: Sequence[str] = ()
    service_account: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    priority_class: str | None = None
    env: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    volumes: Mapping[str, Volume | Mapping[str, Any]] = field(default_factory=dict)
    run_as_user: int | None = None
    python: str | None = None
    patch: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if mistakes := list(self._mistakes()):
            raise ValueError("; ".join(mistakes))

    @classmethod
    def of(cls, given: "PodOptions | Mapping[str, Any]") -> "PodOptions":
        """Takes options as users write them: `{"image": "python:3.12"}` too."""
        return made_from(cls, given, "PodOptions", called="pod option")

    def over(self, base: "PodOptions") -> "PodOptions":
        """Returns these options, with those of `base` where these say nothing.

        Dicts are merged, and patches like patches of a pod; lists are replaced.
        """
        merged: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            mine, theirs = getattr(self, each.name), getattr(base, each.name)
            if each.name == "patch":
                merged[each.name] = _merged(theirs, mine, "patch")
            elif isinstance(mine, Mapping):
                merged[each.name] = {**theirs, **mine}
            else:
                merged[each.name] = theirs if mine in (None, (), []) else mine
        return PodOptions(**merged)

    def _mistakes(self) -> Iterator[str]:
        given: dict[str, Any] = vars(self)  # not all users run mypy
        for name, (kind, called) in _SHAPES.items():
            value = given[name]
            if value is not None and not isinstance(value, kind):
                yield f"{name}: {called}, not {value!r}"
            elif name != "volumes":
                yield from _not_json(value, name)
        user = given["run_as_user"]
        if user is not None and (isinstance(user, bool) or not isinstance(user, int) or user < 0):
            yield f"run_as_user: the number of a user, not {user!r}"
        if isinstance(given["env"], Mapping):
            for name in given["env"]:
                if str(name).startswith(_ENV_PREFIX):
                    yield f"env[{name!r}]: names that begin with {_ENV_PREFIX} are the launcher's own"
        if isinstance(given["volumes"], Mapping):
            yield from _volume_mistakes(given["volumes"])
        if isinstance(given["patch"], Mapping):
            yield from _patch_mistakes(given["patch"])


def _volume_mistakes(given: Mapping[object, Any]) -> Iterator[str]:
    for name, each in given.items():
        where = f"volumes[{name!r}]"
        if name in _RESERVED_VOLUMES:
            yield f"{where}: {name!r} is the launcher's own; choose another name"
        try:
            Volume.of(each)
        except (TypeError, ValueError) as error:
            yield f"{where}: {error}"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _not_json(value: object, where: str) -> Iterator[str]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        yield f"{where}: it cannot be written as JSON: {error}"


def _patch_mistakes(patch: Mapping[str, Any]) -> Iterator[str]:
    for name, value in patch.items():
        if name not in ("metadata", "spec"):
            yield f"patch: a pod template has metadata and spec, not {name!r}"
        elif not isinstance(value, Mapping):
            yield f"patch.{name}: a dict, not {value!r}"
        else:
            try:
                _merged({}, value, f"patch.{name}")
            except ValueError as error:
                yield str(error)


def _merged(base: Any, patch: Any, where: str) -> Any:
    """Merges a patch into a part of a pod template, or of a patch; what it removes stays, marked.

    It raises ValueError if a dict stands where there is a list, or the like.
    """
    if isinstance(patch, Mapping):
        if base is not None and not isinstance(base, Mapping):
            raise ValueError(f"{where}: {_kind(base)}, not {dict(patch)!r}")
        merged = dict(base or {})
        for name, value in patch.items():
            here, key = f"{where}.{name}", _KEYS.get(name)
            if key is None or value is None:
                merged[name] = _merged(merged.get(name), value, here)
                continue
            if not _is_list(value):
                raise ValueError(f"{here}: a list of dicts with {key!r}, not {value!r}")
            entries = {each[key]: each for each in merged.get(name) or ()}
            for index, each in enumerate(value):
                if not isinstance(each, Mapping) or not isinstance(each.get(key), str | int):
                    raise ValueError(f"{here}[{index}]: a dict with {key!r}, not {each!r}")
                there = f"{here}[{each[key]}]"
                if (how := each.get(_DIRECTIVE, "delete")) != "delete":
                    raise ValueError(f"{there}.{_DIRECTIVE}: 'delete', not {how!r}")
                before = None if _DIRECTIVE in each else entries.get(each[key])
                entries[each[key]] = _merged(before, each, there)
            merged[name] = list(entries.values())
        return merged
    if base is not None and patch is not None:
        if isinstance(base, Mapping) or _is_list(base) != _is_list(patch):
            raise ValueError(f"{where}: {_kind(base)}, not {patch!r}")
    return patch


def _without_removed(value: Any) -> Any:
    """Returns a copy of a part of a pod template without what patches have removed."""
    if isinstance(value, Mapping):
        return {key: _without_removed(each) for key, each in value.items() if each is not None}
    if not _is_list(value):
        return value
    return [
        _without_removed(each)
        for each in value
        if not (isinstance(each, Mapping) and _DIRECTIVE in each)
    ]


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "a dict"
    return "a list" if _is_list(value) else f"a value like {value!r}"


def pod_template(
    options: PodOptions,
    *,
    container: str,
    script: str,
    env: Mapping[str, str],
    ports: Mapping[str, int],
    resources: Mapping[str, Any],
    volumes: Mapping[str, Mapping[str, Any]],
    metadata: Mapping[str, Any],
    spec: Mapping[str, Any],
    moves: bool,
) -> dict[str, Any]:
    """Returns the template of pods, as the API takes it.

    `script` is the file, below `MOUNTS`, that the container of this name runs. `env` and `volumes`
    are the launcher's own, by name. If a pod `moves`, a new one replaces it when its machine is
    lost. It raises ValueError, with all mistakes, if the patch does not fit, or removes what the
    launcher needs.
    """
    given = {name: Volume.of(each) for name, each in options.volumes.items()}
    at = {volume.mount.rstrip("/") for volume in given.values()}
    # A volume of the user's may take the place of /tmp and /dev/shm.
    mounts = [each for each in map(_own_mount, volumes) if each["mountPath"] not in at]
    mounted = {each["name"] for each in mounts}
    user = _NOBODY if options.run_as_user is None else options.run_as_user
    every = {**env, **_ENV, **options.env}
    needs = {
        "imagePullPolicy": options.pull_policy,
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
        ],
        "resources": resources,
    }
    wishes = {
        "imagePullSecrets": [{"name": name} for name in options.pull_secrets],
        "serviceAccountName": options.service_account,
        "nodeSelector": options.node_selector,
        "tolerations": _tolerations(options, moves=moves),
        "priorityClassName": options.priority_class,
    }
    main = {
        "name": container,
        "image": options.image,
        "command": [options.python or "python3", f"{MOUNTS}/{script}"],
        "env": [
            {"name": name, "valueFrom" if isinstance(value, Mapping) else "value": value}
            for name, value in every.items()
        ],
        **{name: value for name, value in needs.items() if value},
        "volumeMounts": [*mounts, *(_mount(name, each) for name, each in given.items())],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    template: dict[str, Any] = {
        "metadata": metadata,
        "spec": {
            "restartPolicy": "Never",
            **spec,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": user != 0,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                # Otherwise Kubernetes goes through all files of a volume whenever a pod starts.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **{name: value for name, value in wishes.items() if value},
            "containers": [main],
            "volumes": [
                *({"name": name, **volumes[name]} for name in volumes if name in mounted),
                *({"name": name, **each.source} for name, each in given.items()),
            ],
        },
    }
    patched: dict[str, Any] = _without_removed(_merged(template, options.patch, "patch"))
    # A patch for all pods may speak of both kinds of them.
    patched["spec"]["containers"] = [
        each
        for each in patched["spec"].get("containers") or ()
        if each["name"] == container or each["name"] not in (NODE, SUPERVISOR)
    ]
    if mistakes := list(_lost(template, patched, container)):
        raise ValueError("; ".join(mistakes))
    return patched


def _tolerations(options: PodOptions, *, moves: bool) -> list[Mapping[str, Any]]:
    given: list[Any] = [*options.tolerations]  # not all users run mypy
    known = {each.get("key") for each in given if isinstance(each, Mapping)}
    for key in _MACHINE_LOST:
        if moves and key not in known:
            ours = {"key": key, "operator": "Exists", "effect": "NoExecute"}
            given.append({**ours, "tolerationSeconds": _WITHOUT_MACHINE_S})
    return given


def _own_mount(name: str) -> dict[str, Any]:
    if name in _WRITABLE:
        return {"name": name, "mountPath": _WRITABLE[name]}
    return {"name": name, "mountPath": f"{MOUNTS}/{name}", "readOnly": True}


def _mount(name: str, volume: Volume) -> dict[str, Any]:
    options = {"readOnly": volume.read_only, "subPath": volume.sub_path}
    chosen = {option: value for option, value in options.items() if value not in (False, None)}
    return {"name": name, "mountPath": volume.mount, **chosen}


def _lost(template: Mapping[str, Any], patched: Mapping[str, Any], container: str) -> Iterator[str]:
    """Yields what a patch has removed or changed that the launcher needs."""
    labels = patched.get("metadata", {}).get("labels") or {}
    for name, value in template["metadata"]["labels"].items():
        if labels.get(name) != value:
            yield f"patch.metadata.labels: {name!r} is the launcher's own and stays {value!r}"
    spec = patched.get("spec", {})
    for name in ("hostname", "restartPolicy", "subdomain"):
        if spec.get(name) != (kept := template["spec"].get(name)):
            stays = "is not set" if kept is None else f"stays {kept!r}"
            yield f"patch.spec.{name}: it is the launcher's own and {stays}"
    terms = _neighbour_terms(template["spec"])
    if terms and any(term not in _neighbour_terms(spec) for term in terms):
        yield (
            f"patch.spec.affinity: what runs together needs its own term in podAffinity.{REQUIRED}; "
            "choose nodes of the cluster by nodeAffinity or node_selector"
        )
    after = {each["name"]: each for each in spec.get("containers") or ()}
    if container not in after:
        yield f"patch.spec.containers: the container {container!r} is the launcher's own and stays"
        return
    env = {each["name"]: each for each in after[container].get("env") or ()}
    for each in template["spec"]["containers"][0]["env"]:
        if each["name"].startswith(_ENV_PREFIX) and env.get(each["name"]) != each:
            where = f"patch.spec.containers[{container}].env"
            yield f"{where}: {each['name']} is the launcher's own and stays"


def _neighbour_terms(spec: Mapping[str, Any]) -> Sequence[Any]:
    affinity = (spec.get("affinity") or {}).get("podAffinity") or {}
    terms: Sequence[Any] = affinity.get(REQUIRED) or ()
    return terms
