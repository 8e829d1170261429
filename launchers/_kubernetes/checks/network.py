"""Services and NetworkPolicies."""

from launchers._kubernetes.checks.metadata import check_labels, check_selector
from launchers._kubernetes.checks.places import Place, Rules, apply, need, shown, unique
from launchers._kubernetes.checks.values import (
    address,
    cidr,
    dns_label,
    network_of,
    one_of,
    port,
    port_or_name,
    port_or_none,
    protocol,
    subdomain,
)

_EXTERNAL_TYPES = ("NodePort", "LoadBalancer")
_SERVICE_RULES: Rules = (
    ("type", one_of("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")),
    ("sessionAffinity", one_of("None", "ClientIP")),
    ("{internalTrafficPolicy,externalTrafficPolicy}", one_of("Cluster", "Local")),
    ("ipFamilies[]", one_of("IPv4", "IPv6")),
    ("ipFamilyPolicy", one_of("SingleStack", "PreferDualStack", "RequireDualStack")),
    ("ports[].name", dns_label),
    ("ports[].port", port),
    ("ports[].nodePort", port_or_none),
    ("ports[].targetPort", port_or_name),
    ("ports[].protocol", protocol),
    ("externalIPs[]", address),
)
_POLICY_RULES: Rules = (
    ("policyTypes[]", one_of("Ingress", "Egress")),
    ("{ingress,egress}[].ports[].protocol", protocol),
    ("{ingress,egress}[].ports[].port", port_or_name),
    ("{ingress,egress}[].ports[].endPort", port),
)


def check_service(root: Place) -> None:
    spec = root["spec"]
    apply(spec, _SERVICE_RULES)
    need(spec, [("ports[]", "port")])
    check_labels(spec["selector"])
    kind, cluster_ip = spec["type"].text, spec["clusterIP"]
    headless = cluster_ip.value == "None"
    if not headless:
        cluster_ip.obey(address)
    if kind == "ExternalName":
        if cluster_ip.text:
            cluster_ip.wrong(f"{shown(cluster_ip.value)} does not go with type ExternalName")
        if not spec["externalName"].text:
            spec["externalName"].wrong("missing; type ExternalName needs it")
    elif headless and kind in _EXTERNAL_TYPES:
        cluster_ip.wrong(f"'None' does not go with type {kind}")
    # A name may be absolute.
    if complaint := subdomain(spec["externalName"].text.removesuffix(".")):
        spec["externalName"].wrong(complaint)
    if not spec["ports"].elements and not headless and kind != "ExternalName":
        spec["ports"].wrong("missing; only a headless Service (clusterIP: None) may have none")
    reachable = kind in _EXTERNAL_TYPES or spec["externalIPs"].elements
    if spec["externalTrafficPolicy"].text and not reachable:
        spec["externalTrafficPolicy"].wrong(
            "only types NodePort and LoadBalancer have it, and Services with externalIPs"
        )
    _check_ports(spec["ports"], kind)


def _check_ports(ports: Place, kind: str) -> None:
    unique((each["name"] for each in ports.elements), "name each port differently")
    taken = set()
    for each in ports.elements:
        if len(ports.elements) > 1 and not each["name"].text:
            each["name"].wrong("missing; where there are several ports each needs a name")
        if each["nodePort"].value and kind in ("", "ClusterIP", "ExternalName"):
            each["nodePort"].wrong("only types NodePort and LoadBalancer have it")
        end = (each["port"].number, each["protocol"].text or "TCP")
        if each["port"].number is not None and end in taken:
            each["port"].wrong(f"{shown(each['port'].value)} is used twice; take another")
        taken.add(end)


def check_network_policy(root: Place) -> None:
    spec = root["spec"]
    apply(spec, _POLICY_RULES)
    check_selector(spec["podSelector"])
    unique(spec["policyTypes"].elements, "name each once")
    for each in spec.select("{ingress,egress}[].ports[]"):
        first, last = each["port"].number, each["endPort"].number
        if each["endPort"].given and first is None:
            each["endPort"].wrong("needs a port that is a number")
        elif first is not None and last is not None and last < first:
            each["endPort"].wrong(f"{last} is below port, {first}")
    for peer in (*spec.select("ingress[].from[]"), *spec.select("egress[].to[]")):
        _check_peer(peer)


def _check_peer(peer: Place) -> None:
    check_selector(peer["podSelector"])
    check_selector(peer["namespaceSelector"])
    block = peer["ipBlock"]
    selects = peer["podSelector"].given or peer["namespaceSelector"].given
    if not block.given and not selects:
        peer.wrong("empty; give podSelector, namespaceSelector or ipBlock")
    elif block.given and selects:
        block.wrong("does not go with selectors; make it a peer of its own")
    need(peer, [("ipBlock", "cidr")])
    apply(block, [("cidr", cidr), ("except[]", cidr)])
    whole = network_of(block["cidr"].value)
    for each in block["except"].elements:
        part = network_of(each.value)
        if whole and part:
            if whole.version != part.version or not (
                whole.prefixlen < part.prefixlen and part.network_address in whole
            ):
                each.wrong(f"{shown(each.value)} is no part of {block['cidr'].text}")
