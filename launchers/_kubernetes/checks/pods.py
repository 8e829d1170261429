"""Templates of pods."""

from collections.abc import Iterable

from launchers._kubernetes.checks.containers import check_container, check_init_container
from launchers._kubernetes.checks.metadata import check_metadata
from launchers._kubernetes.checks.places import (
    Needs,
    Place,
    Rules,
    apply,
    exactly_one,
    need,
    shown,
    unique,
)
from launchers._kubernetes.checks.quantities import check_resources, quantity
from launchers._kubernetes.checks.scheduling import check_scheduling
from launchers._kubernetes.checks.security import check_context_of_pod
from launchers._kubernetes.checks.values import (
    INT64_MAX,
    address,
    between,
    dns_label,
    one_of,
    positive,
    qualified_name,
    subdomain,
)
from launchers._kubernetes.checks.volumes import check_volume

#: What a pod shares with its host, if it says so.
_SHARED = "{hostNetwork,hostPID,hostIPC}"
_SYSCTLS_OF_IPC = ("kernel.shm", "kernel.msg", "kernel.sem", "fs.mqueue.")
_RULES: Rules = (
    ("restartPolicy", one_of("Always", "OnFailure", "Never")),
    ("dnsPolicy", one_of("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")),
    ("preemptionPolicy", one_of("Never", "PreemptLowerPriority")),
    ("os.name", one_of("linux", "windows")),
    ("terminationGracePeriodSeconds", between(0, INT64_MAX)),
    ("activeDeadlineSeconds", positive),
    ("{hostname,subdomain}", dns_label),
    ("{serviceAccountName,serviceAccount,priorityClassName,runtimeClassName,nodeName}", subdomain),
    ("imagePullSecrets[].name", subdomain),
    ("overhead.*", quantity),
    ("hostAliases[].ip", address),
    ("hostAliases[].hostnames[]", subdomain),
    ("readinessGates[].conditionType", qualified_name),
    ("dnsConfig.nameservers[]", address),
    ("resourceClaims[].name", dns_label),
    ("resourceClaims[].{resourceClaimName,resourceClaimTemplateName}", subdomain),
)
_NEEDS: Needs = (
    ("", "containers"),
    ("dnsConfig.options[]", "name"),
    ("hostAliases[]", "ip"),
    ("readinessGates[]", "conditionType"),
    ("resourceClaims[]", "name"),
    ("schedulingGates[]", "name"),
)


def check_template(template: Place) -> None:
    check_metadata(template["metadata"])
    need(template, [("", "spec")])
    pod = template["spec"]
    if not pod.given:
        return
    apply(pod, _RULES)
    need(pod, _NEEDS)
    if pod["ephemeralContainers"].value:
        pod["ephemeralContainers"].wrong("not allowed in a template; use containers")
    containers = list(pod.select("{containers,initContainers}[]"))
    unique((each["name"] for each in containers), "name each container differently")
    unique(pod.select("volumes[].name"), "name each volume differently")
    unique(pod.select("resourceClaims[].name"), "name each differently")
    unique(pod.select("schedulingGates[].name"), "name each once")
    for claim in pod["resourceClaims"].elements:
        exactly_one(claim, ("resourceClaimName", "resourceClaimTemplateName"), "source")
    for volume in pod.select("volumes[]"):
        check_volume(volume)
    for container in containers:
        check_container(container, pod)
    for container in pod["initContainers"].elements:
        check_init_container(container)
    check_resources(pod["resources"], [each.text for each in pod.select("resourceClaims[].name")])
    check_context_of_pod(pod["securityContext"])
    check_scheduling(pod)
    _check_sharing(pod)
    _check_ports_of_host(pod, containers)
    _check_dns(pod)


def _check_sharing(pod: Place) -> None:
    """What of the host a pod may share."""
    if pod["shareProcessNamespace"].value is True and pod["hostPID"].value is True:
        pod["shareProcessNamespace"].wrong("does not go with hostPID; leave one out")
    for each in pod.select(_SHARED):
        if pod["hostUsers"].value is False and each.value is True:
            each.wrong("does not go with hostUsers: false; leave one out")
    unique(pod.select("securityContext.sysctls[].name"), "set it once")
    for each in pod.select("securityContext.sysctls[].name"):
        name = each.text.replace("/", ".")
        for begins, shared in (("net.", "hostNetwork"), (_SYSCTLS_OF_IPC, "hostIPC")):
            if name.startswith(begins) and pod[shared].value is True:
                each.wrong(f"{shown(each.value)} does not go with {shared}: it would be the host's")


def _check_ports_of_host(pod: Place, containers: Iterable[Place]) -> None:
    taken = set()
    for port in (port for each in containers for port in each["ports"].elements):
        own, host = port["containerPort"].value, port["hostPort"].number
        if not host:
            continue
        if pod["hostNetwork"].value is True and host != own:
            port["hostPort"].wrong(f"with hostNetwork it must be containerPort, {shown(own)}")
        # Init containers run before the others.
        early = ".initContainers[" in port.path
        end = (early, host, port["protocol"].text or "TCP", port["hostIP"].text)
        if end in taken:
            port["hostPort"].wrong(f"{host} is used twice; take another")
        taken.add(end)


def _check_dns(pod: Place) -> None:
    config = pod["dnsConfig"]
    if pod["dnsPolicy"].value == "None" and not config["nameservers"].elements:
        config["nameservers"].wrong("missing; dnsPolicy None needs at least one")
    if len(config["nameservers"].elements) > 3:
        config["nameservers"].wrong("at most 3 are allowed")
    searches = config["searches"].elements
    if len(searches) > 32 or len(" ".join(each.text for each in searches)) > 2048:
        config["searches"].wrong("at most 32 of 2048 characters in all are allowed")
    for each in searches:
        # A name may be absolute, and parts of it may begin with '_', as those of services do.
        if each.text != "." and subdomain(each.text.removesuffix(".").replace("_", "a")):
            each.wrong(f"{shown(each.value)} is no DNS name")
