"""Asks the API server, before any object of a run is created, which ones it would refuse."""

import re
from collections.abc import Iterator, Mapping, Sequence

from launchers.kubernetes._client import Api, ApiError, Json
from launchers.kubernetes._names import Names
from launchers.kubernetes._pods import PodOptions

#: Names of pod options, by the field that each one sets.
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
    """Returns why the server would refuse objects, in its words, for all of them; creates none.

    Some errors show only when the objects are created: missing rights, names that are taken, and
    references to objects that do not exist yet, which may be other objects of the run. `pods` are
    the user's options by name of the Job, so that each text can name the options that set the
    field.
    """
    found = []
    for each in _judged(objects):
        kind, name = each["kind"], each["metadata"]["name"]
        try:
            api.rehearse(each)
        except ApiError as error:
            if error.status is None or error.status >= 500:
                break  # the server does not answer: each further object would wait as long
            if _is_refusal(error):
                whose = names.describe(kind, name)
                found += [f"{whose}: {what}{_origin(what, pods.get(name))}" for what in error.said]
    return found


def _judged(objects: Sequence[Json]) -> Iterator[Json]:
    for each in objects:
        # The launcher made the content of Secrets itself, and it may be megabytes.
        yield {**each, "data": {}} if each["kind"] == "Secret" else each
        # The server checks the Jobs in a JobSet only when it makes them.
        jobs = each["spec"]["replicatedJobs"] if each["kind"] == "JobSet" else ()
        for job in jobs:
            name = f"{each['metadata']['name']}-{job['name']}-0"
            meta = {**job["template"]["metadata"], "name": name}
            yield {"apiVersion": "batch/v1", "kind": "Job", **job["template"], "metadata": meta}


def _is_refusal(error: ApiError) -> bool:
    said = " ".join(error.said)
    # Missing rights, webhooks that support no dry run, and references to other objects.
    left = ("cannot create resource", "does not support dry run", "not found")
    return error.status == 422 or (
        error.status in (400, 403) and not any(each in said for each in left)
    )


def _origin(said: str, pod: PodOptions | None) -> str:
    """Returns which options of the user may have set the field that the server names."""
    fields = re.search(r"template\.\S+", said)
    if fields is None or pod is None:
        return ""
    own = (_OPTIONS[field] for field in re.findall(r"\w+", fields[0]) if field in _OPTIONS)
    found = [name for name in (next(own, ""), "patch") if name and getattr(pod, name)]
    return f" (option {' or '.join(found)})" if found else ""
