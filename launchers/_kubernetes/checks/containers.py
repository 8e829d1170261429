"""Containers of a pod: what they run, their ports, variables, probes and hooks."""

from launchers._kubernetes.checks import downward
from launchers._kubernetes.checks.places import (
    Needs,
    Place,
    Rules,
    apply,
    exactly_one,
    need,
    unique,
)
from launchers._kubernetes.checks.quantities import check_resources
from launchers._kubernetes.checks.security import check_context_of_container
from launchers._kubernetes.checks.values import (
    absolute_path,
    address,
    count,
    data_key,
    dns_label,
    env_name,
    env_prefix,
    image,
    one_of,
    port,
    port_name,
    port_or_name,
    port_or_none,
    positive_long,
    protocol,
    pull_policy,
    subdomain,
)
from launchers._kubernetes.checks.volumes import check_mounts

_PROBES = "{livenessProbe,readinessProbe,startupProbe}"
_HOOKS = "lifecycle.{postStart,preStop}"
_KEY_SOURCES = "env[].valueFrom.{secretKeyRef,configMapKeyRef}"
_ENV_SOURCES = ("fieldRef", "resourceFieldRef", "secretKeyRef", "configMapKeyRef", "fileKeyRef")
_RULES: Rules = (
    ("name", dns_label),
    ("image", image),
    ("imagePullPolicy", pull_policy),
    ("restartPolicy", one_of("Always", "OnFailure", "Never")),
    ("workingDir", absolute_path),
    ("terminationMessagePath", absolute_path),
    ("terminationMessagePolicy", one_of("File", "FallbackToLogsOnError")),
    ("resizePolicy[].resourceName", one_of("cpu", "memory")),
    ("resizePolicy[].restartPolicy", one_of("NotRequired", "RestartContainer")),
    ("ports[].containerPort", port),
    ("ports[].hostPort", port_or_none),
    ("ports[].name", port_name),
    ("ports[].protocol", protocol),
    ("ports[].hostIP", address),
    ("env[].name", env_name),
    (f"{_KEY_SOURCES}.key", data_key),
    (f"{_KEY_SOURCES}.name", subdomain),
    ("envFrom[].prefix", env_prefix),
    ("envFrom[].{secretRef,configMapRef}.name", subdomain),
    (f"{_PROBES}.{{initialDelaySeconds,timeoutSeconds,periodSeconds}}", count),
    (f"{_PROBES}.{{successThreshold,failureThreshold}}", count),
    (f"{_PROBES}.terminationGracePeriodSeconds", positive_long),
    (f"{_PROBES}.grpc.port", port),
    (f"{_HOOKS}.sleep.seconds", positive_long),
    *((f"{each}.{{httpGet,tcpSocket}}.port", port_or_name) for each in (_PROBES, _HOOKS)),
    *((f"{each}.httpGet.scheme", one_of("HTTP", "HTTPS")) for each in (_PROBES, _HOOKS)),
)
_NEEDS: Needs = (
    ("", "name,image"),
    ("ports[]", "containerPort"),
    ("env[]", "name"),
    (_KEY_SOURCES, "name,key"),
    ("env[].valueFrom.fieldRef", "fieldPath"),
    ("env[].valueFrom.resourceFieldRef", "resource"),
    ("envFrom[].{secretRef,configMapRef}", "name"),
    ("resources.claims[]", "name"),
    (f"{_PROBES}.exec", "command"),
    (f"{_PROBES}.{{httpGet,tcpSocket,grpc}}", "port"),
    (f"{_HOOKS}.exec", "command"),
    (f"{_HOOKS}.{{httpGet,tcpSocket}}", "port"),
)


def check_container(container: Place, pod: Place) -> None:
    apply(container, _RULES)
    need(container, _NEEDS)
    claims = [each.text for each in pod.select("resourceClaims[].name")]
    check_resources(container["resources"], claims)
    unique(container.select("ports[].name"), "name each port of it differently")
    _check_environment(container)
    check_mounts(container, {each["name"].text: each for each in pod["volumes"].elements})
    _check_probes(container)
    _check_hooks(container, pod)
    check_context_of_container(container["securityContext"], pod["securityContext"])


def check_init_container(container: Place) -> None:
    """Checks what holds for an init container beyond what holds for all."""
    if container["restartPolicy"].value != "Always":
        for each in container.select("{livenessProbe,readinessProbe,startupProbe,lifecycle}"):
            each.wrong("an init container has none, unless restartPolicy: Always")


def _check_environment(container: Place) -> None:
    for variable in container["env"].elements:
        source = variable["valueFrom"]
        if not source.given:
            continue
        if variable["value"].text:
            variable.wrong("value and valueFrom are given; leave one out")
        exactly_one(source, _ENV_SOURCES, "source")
        downward.check_variable(source)
    for each in container["envFrom"].elements:
        exactly_one(each, ("configMapRef", "secretRef"), "source")


def _check_probes(container: Place) -> None:
    for probe in container.select(_PROBES):
        exactly_one(probe, ("exec", "httpGet", "tcpSocket", "grpc"), "handler")
    for probe in container.select("{livenessProbe,startupProbe}"):
        if probe["successThreshold"].number not in (None, 0, 1):
            probe["successThreshold"].wrong("must be 1 here")
    for grace in container.select("readinessProbe.terminationGracePeriodSeconds"):
        grace.wrong("not allowed here: it ends no container")


def _check_hooks(container: Place, pod: Place) -> None:
    grace = pod["terminationGracePeriodSeconds"].number
    for hook in container.select(_HOOKS):
        exactly_one(hook, ("exec", "httpGet", "tcpSocket", "sleep"), "handler")
        if (hook["sleep"]["seconds"].number or 0) > (30 if grace is None else grace):
            hook["sleep"]["seconds"].wrong("is longer than terminationGracePeriodSeconds")
