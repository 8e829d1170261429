"""What the API server would refuse in the objects of a run: it is asked before any is created."""

import re
from collections.abc import Iterator, Mapping, Sequence

from launchers._kubernetes.client import Api, ApiError, Json
from launchers._kubernetes.names import Names
from launchers._kubernetes.pods import PodOptions

#: The options of pods by the fields that they make.
_OPTIONS = {
    "env": "env",
    "image": "image",
    "imagePullPolicy": "pull_policy",
    "imagePullSecrets": "pull_secrets",
    "nodeSelector": "node_selector",
    "priorityClassName": "priority_class",
    "runAsUser": "run_as_user",
    "serviceAccountName": "service_account",
    "tolerations": "tolerations",
    "volumeMounts": "volumes",
    "volumes": "volumes",
}


def refusals(
    api: Api, objects: Sequence[Json], names: Names, pods: Mapping[str, PodOptions]
) -> list[str]:
    """Returns what the server has against objects, all at once; creates none.

    What it cannot judge before the objects are there is left to their creation: rights that are
    missing, names that are taken, and what it does not find, which may be another object of the run.

    Args:
        api: The cluster.
        objects: All of a run.
        names: Theirs.
        pods: What the user wants of the pods, by name of their Job.

    Returns:
        Texts in the server's words, each with whose object it is and which options made the field.
    """
    found = []
    for each in _judged(objects):
        kind, name = each["kind"], each["metadata"]["name"]
        try:
            api.rehearse(each)
        except ApiError as error:
            if error.status is None or error.status >= 500:
                break  # it would be asked, and waited for, again with each object
            if _is_refusal(error):
                whose = names.describe(kind, name)
                found += [f"{whose}: {what}{_origin(what, pods.get(name))}" for what in error.said]
    return found


def _judged(objects: Sequence[Json]) -> Iterator[Json]:
    for each in objects:
        # What Secrets hold is ours, and may be megabytes.
        yield {**each, "data": {}} if each["kind"] == "Secret" else each
        # The server knows nothing of the Jobs in a JobSet before they are made.
        jobs = each["spec"]["replicatedJobs"] if each["kind"] == "JobSet" else ()
        for job in jobs:
            name = f"{each['metadata']['name']}-{job['name']}-0"
            meta = {**job["template"]["metadata"], "name": name}
            yield {"apiVersion": "batch/v1", "kind": "Job", **job["template"], "metadata": meta}


def _is_refusal(error: ApiError) -> bool:
    """Returns whether the server has something against the object itself."""
    said = " ".join(error.said)
    # Rights that are missing, webhooks that cannot be asked, and those that look for objects.
    left = ("cannot create resource", "does not support dry run", "not found")
    return error.status == 422 or (
        error.status in (400, 403) and not any(each in said for each in left)
    )


def _origin(said: str, pod: PodOptions | None) -> str:
    """Returns which options of the user's may have made the field that the server speaks of."""
    fields = re.search(r"template\.\S+", said)
    if fields is None or pod is None:
        return ""
    own = (_OPTIONS[field] for field in re.findall(r"\w+", fields[0]) if field in _OPTIONS)
    found = [name for name in (next(own, ""), "patch") if name and getattr(pod, name)]
    return f" (option {' or '.join(found)})" if found else ""
