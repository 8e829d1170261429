"""Where pods may run: node selectors, tolerations, topology, affinity."""

from collections import Counter

from launchers._kubernetes.checks.metadata import check_labels, check_requirement, check_selector
from launchers._kubernetes.checks.places import Place, Rules, apply, need
from launchers._kubernetes.checks.values import (
    between,
    dns_label,
    label_value,
    one_of,
    positive,
    qualified_name,
)

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_NODE_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
_RULES: Rules = (
    ("schedulerName", qualified_name),
    ("schedulingGates[].name", qualified_name),
    ("tolerations[].key", qualified_name),
    ("tolerations[].operator", one_of("Exists", "Equal")),
    ("tolerations[].effect", one_of("NoSchedule", "PreferNoSchedule", "NoExecute")),
    ("tolerations[].value", label_value),
    ("topologySpreadConstraints[].{maxSkew,minDomains}", positive),
    ("topologySpreadConstraints[].topologyKey", qualified_name),
    ("topologySpreadConstraints[].whenUnsatisfiable", one_of("DoNotSchedule", "ScheduleAnyway")),
    (
        "topologySpreadConstraints[].{nodeAffinityPolicy,nodeTaintsPolicy}",
        one_of("Honor", "Ignore"),
    ),
)


def check_scheduling(pod: Place) -> None:
    apply(pod, _RULES)
    need(pod, [("topologySpreadConstraints[]", "maxSkew,topologyKey,whenUnsatisfiable")])
    check_labels(pod["nodeSelector"])
    for toleration in pod["tolerations"].elements:
        _check_toleration(toleration)
    _check_spread(pod["topologySpreadConstraints"])
    _check_node_affinity(pod["affinity"]["nodeAffinity"])
    for kind in ("podAffinity", "podAntiAffinity"):
        _check_pod_affinity(pod["affinity"][kind])


def _check_toleration(toleration: Place) -> None:
    operator = toleration["operator"]
    if not toleration["key"].text and operator.text != "Exists":
        operator.wrong("must be 'Exists' where no key is given")
    if operator.text == "Exists" and toleration["value"].text:
        toleration["value"].wrong("operator Exists takes none; leave it out")
    if toleration["tolerationSeconds"].given and toleration["effect"].value != "NoExecute":
        toleration["effect"].wrong("must be 'NoExecute' where tolerationSeconds is given")


def _check_spread(constraints: Place) -> None:
    pairs = Counter(
        (each["topologyKey"].text, each["whenUnsatisfiable"].text) for each in constraints.elements
    )
    if any(count > 1 for count in pairs.values()):
        constraints.wrong("two have the same topologyKey and whenUnsatisfiable; leave one out")
    for each in constraints.elements:
        check_selector(each["labelSelector"])
        if each["minDomains"].given and each["whenUnsatisfiable"].value != "DoNotSchedule":
            each["minDomains"].wrong("needs whenUnsatisfiable: DoNotSchedule")
        if each["matchLabelKeys"].elements and not each["labelSelector"].given:
            each["matchLabelKeys"].wrong("needs a labelSelector")


def _check_node_affinity(affinity: Place) -> None:
    _check_weights(affinity)
    need(affinity, [(_REQUIRED, "nodeSelectorTerms")])
    # Where they are only preferred, the server lets values pass that no node can have.
    apply(
        affinity,
        [(f"{_REQUIRED}.nodeSelectorTerms[].matchExpressions[].values[]", label_value)],
    )
    for term in (
        *affinity.select(f"{_REQUIRED}.nodeSelectorTerms[]"),
        *affinity.select(f"{_PREFERRED}[].preference"),
    ):
        for each in term["matchExpressions"].elements:
            check_requirement(each, _NODE_OPERATORS)
        for each in term["matchFields"].elements:
            check_requirement(each, ("In", "NotIn"))
            if each["key"].text not in ("", "metadata.name") or len(each["values"].elements) > 1:
                each.wrong("only metadata.name with one value is allowed")


def _check_pod_affinity(affinity: Place) -> None:
    _check_weights(affinity)
    for term in (
        *affinity.select(f"{_REQUIRED}[]"),
        *affinity.select(f"{_PREFERRED}[].podAffinityTerm"),
    ):
        need(term, [("", "topologyKey")])
        apply(term, [("topologyKey", qualified_name), ("namespaces[]", dns_label)])
        check_selector(term["labelSelector"])
        check_selector(term["namespaceSelector"])


def _check_weights(affinity: Place) -> None:
    need(affinity, [(f"{_PREFERRED}[]", "weight")])
    apply(affinity, [(f"{_PREFERRED}[].weight", between(1, 100))])
