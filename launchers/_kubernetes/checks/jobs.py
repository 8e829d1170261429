"""Jobs, and JobSets, which are made of them."""

from launchers._kubernetes.checks.metadata import check_metadata
from launchers._kubernetes.checks.places import (
    Needs,
    Place,
    Rules,
    apply,
    is_map,
    meant,
    need,
    shown,
    unique,
)
from launchers._kubernetes.checks.pods import check_template
from launchers._kubernetes.checks.values import (
    controller_name,
    count,
    dns_label,
    one_of,
    positive_long,
    qualified_name,
    service_name,
    subdomain,
)

#: How many pods of an Indexed Job may run, and how many indexes may fail.
_MOST = 100_000
#: The same where there are more than `_MOST` indexes, each with a limit of its own.
_MOST_OF_MANY = 10_000
_RULES: Rules = (
    ("{parallelism,completions,backoffLimit,backoffLimitPerIndex,maxFailedIndexes}", count),
    ("ttlSecondsAfterFinished", count),
    ("activeDeadlineSeconds", positive_long),
    ("completionMode", one_of("NonIndexed", "Indexed")),
    ("managedBy", controller_name),
    ("podReplacementPolicy", one_of("TerminatingOrFailed", "Failed")),
    ("podFailurePolicy.rules[].action", one_of("Count", "FailIndex", "FailJob", "Ignore")),
    ("podFailurePolicy.rules[].onExitCodes.operator", one_of("In", "NotIn")),
    ("podFailurePolicy.rules[].onPodConditions[].type", qualified_name),
    ("podFailurePolicy.rules[].onPodConditions[].status", one_of("True", "False", "Unknown")),
)
_NEEDS: Needs = (
    ("", "template"),
    ("podFailurePolicy", "rules"),
    ("podFailurePolicy.rules[]", "action"),
    ("podFailurePolicy.rules[].onExitCodes", "operator,values"),
    ("podFailurePolicy.rules[].onPodConditions[]", "type"),
    ("successPolicy", "rules"),
)
#: Labels that the Job controller gives its pods.
_NAME_LABELS = ("job-name", "batch.kubernetes.io/job-name")
_UID_LABELS = ("controller-uid", "batch.kubernetes.io/controller-uid")

_JOB_SET_RULES: Rules = (
    ("replicatedJobs[].name", service_name),
    ("replicatedJobs[].replicas", count),
    ("network.subdomain", service_name),
    ("ttlSecondsAfterFinished", count),
    ("successPolicy.operator", one_of("All", "Any")),
    ("failurePolicy.maxRestarts", count),
    ("startupPolicy.startupPolicyOrder", one_of("AnyOrder", "InOrder")),
)


def check_job(root: Place) -> None:
    _check_job(root["metadata"]["name"], root["metadata"]["name"].text, root["spec"])


def check_job_set(root: Place) -> None:
    spec = root["spec"]
    need(root, [("", "spec"), ("spec", "replicatedJobs"), ("spec.replicatedJobs[]", "name")])
    apply(spec, _JOB_SET_RULES)
    jobs = spec["replicatedJobs"].elements
    unique((job["name"] for job in jobs), "name each differently")
    for job in jobs:
        if not job["template"].given:
            job["template"].wrong("missing; give it")
            continue
        check_metadata(job["template"]["metadata"])
        replicas = job["replicas"].number or 1
        # The webhook of JobSet wants room for the random end of a pod's name.
        name = f"{root['metadata']['name'].text}-{job['name'].text}-{max(replicas, 1) - 1}"
        _check_job(job["name"], name, job["template"]["spec"], "-abcde")
    known = [job["name"].text for job in jobs]
    for target in spec.select("successPolicy.targetReplicatedJobs[]"):
        if target.text not in known:
            target.wrong(f"{shown(target.value)} is no replicated job; {meant(target.text, known)}")


def _check_job(place: Place, name: str, spec: Place, suffix: str = "") -> None:
    """Checks a Job.

    Args:
        place: Where its name stands, at least in part.
        name: Its name.
        spec: The rest.
        suffix: What else must fit into names of its pods.
    """
    indexed = spec["completionMode"].value == "Indexed"
    if len(name) > 63 and not indexed:
        # The controller gives its pods a label of this value.
        place.wrong(f"{shown(name)} has {len(name)} characters; a Job's has at most 63")
    if spec.given and not is_map(spec.value):
        return
    apply(spec, _RULES)
    need(spec, _NEEDS)
    for field in spec.select("{selector,manualSelector}"):
        if field.value:
            field.wrong("leave it out; the server makes the selector of a Job")
    if indexed:
        _check_indexes(spec)
        _check_name_of_last_pod(place, name, spec["completions"].number or 0, suffix)
    elif spec["completionMode"].value in (None, "", "NonIndexed"):
        for field in spec.select("{backoffLimitPerIndex,maxFailedIndexes,successPolicy}"):
            field.wrong("needs completionMode: Indexed")
    _check_failure_policy(spec)
    _check_template(name, spec)


def _check_indexes(spec: Place) -> None:
    completions, failed = spec["completions"].number, spec["maxFailedIndexes"].number
    parallelism = spec["parallelism"].number or 0
    if not spec["completions"].given:
        spec["completions"].wrong("missing; an Indexed Job needs it")
    if parallelism > _MOST:
        spec["parallelism"].wrong(f"{parallelism}; an Indexed Job has at most {_MOST}")
    if failed is not None:
        if not spec["backoffLimitPerIndex"].given:
            spec["backoffLimitPerIndex"].wrong("missing; maxFailedIndexes needs it")
        if failed > min(_MOST, _MOST if completions is None else completions):
            spec["maxFailedIndexes"].wrong(f"{failed} is above completions or {_MOST}")
    if completions is None:
        return
    if completions > _MOST and spec["backoffLimitPerIndex"].given:
        advice = f"with more than {_MOST} completions, give at most {_MOST_OF_MANY}"
        if failed is None or failed > _MOST_OF_MANY:
            spec["maxFailedIndexes"].wrong(advice)
        if parallelism > _MOST_OF_MANY:
            spec["parallelism"].wrong(advice)
    rules = spec["successPolicy"]["rules"]
    if len(rules.elements) > 20:
        rules.wrong(f"has {len(rules.elements)} rules; at most 20 are allowed")
    for rule in rules.elements:
        if not rule["succeededCount"].given and not rule["succeededIndexes"].given:
            rule.wrong("empty; give succeededCount or succeededIndexes")
        if not 0 <= (rule["succeededCount"].number or 0) <= completions:
            rule["succeededCount"].wrong(f"must be between 0 and {completions}, the completions")


def _check_name_of_last_pod(place: Place, name: str, completions: int, suffix: str) -> None:
    # A name that is none at all has its own mistake.
    if not name or subdomain(name) or completions < 1:
        return
    last = f"{name}-{completions - 1}{suffix}"
    if dns_label(last):
        surplus = len(last) - 63
        advice = "leave out '.'" if "." in name else f"take a name {surplus} characters shorter"
        place.wrong(f"{shown(last)}, as the last pod is called, is no DNS label; {advice}")


def _check_failure_policy(spec: Place) -> None:
    rules = spec["podFailurePolicy"]["rules"]
    if len(rules.elements) > 20:
        rules.wrong(f"has {len(rules.elements)} rules; at most 20 are allowed")
    replaced = spec["podReplacementPolicy"]
    if spec["podFailurePolicy"].given and replaced.value == "TerminatingOrFailed":
        replaced.wrong("with podFailurePolicy only 'Failed' is allowed")
    containers = [
        each["name"].value for each in spec.select("template.spec.{containers,initContainers}[]")
    ]
    for rule in rules.elements:
        codes, conditions = rule["onExitCodes"], rule["onPodConditions"]
        if rule["action"].value == "FailIndex" and not spec["backoffLimitPerIndex"].given:
            rule["action"].wrong("'FailIndex' needs backoffLimitPerIndex")
        if codes.given == bool(conditions.elements):
            rule.wrong("give either onExitCodes or onPodConditions")
        if len(conditions.elements) > 20:
            conditions.wrong(f"has {len(conditions.elements)} elements; at most 20 are allowed")
        container = codes["containerName"]
        if containers and container.text not in ("", *containers):
            container.wrong(
                f"{shown(container.value)} is no container of the pod; "
                f"there are {', '.join(map(shown, containers))}"
            )
        _check_exit_codes(codes)


def _check_exit_codes(codes: Place) -> None:
    values = codes["values"]
    numbers = [each.number for each in values.elements if each.number is not None]
    if len(values.elements) > 255:
        values.wrong(f"has {len(values.elements)} codes; at most 255 are allowed")
    if 0 in numbers and codes["operator"].value == "In":
        values.wrong("holds 0, which is no failure; leave it out")
    if sorted(set(numbers)) != numbers:
        values.wrong("must be ascending, each code once")


def _check_template(name: str, spec: Place) -> None:
    template = spec["template"]
    for key, each in template["metadata"]["labels"].entries:
        if (key in _NAME_LABELS and each.value != name) or key in _UID_LABELS:
            each.wrong("leave it out; the server gives this label")
    if not template.given:
        return
    check_template(template)
    restart = template["spec"]["restartPolicy"]
    if template["spec"].given and restart.value in (None, "", "Always"):
        restart.wrong("pods of a Job are never restarted always; use 'Never' or 'OnFailure'")
    elif restart.value == "OnFailure":
        for field in ("podFailurePolicy", "backoffLimitPerIndex"):
            if spec[field].given:
                restart.wrong(f"'OnFailure' does not go with {field}; use 'Never'")
