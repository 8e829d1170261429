"""Rules about one value: numbers, words, names, paths, addresses."""

import ipaddress
import re

from launchers._kubernetes.checks.places import Rule, is_int, meant, shown

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def between(lowest: int, highest: int, *, octal: bool = False) -> Rule:
    def rule(value: object) -> str | None:
        if not is_int(value) or lowest <= value <= highest:
            return None
        if highest >= INT32_MAX:
            bounds = f"at least {lowest}" if value < lowest else f"at most {highest}"
        elif octal:
            bounds = f"between {oct(lowest)} and {oct(highest)}"
        else:
            bounds = f"between {lowest} and {highest}"
        return f"{shown(value)} is out of range; it must be {bounds}"

    return rule


port = between(1, 65535)
#: Of ports that may be left out, 0 stands for none.
port_or_none = between(0, 65535)
count = between(0, INT32_MAX)
positive = between(1, INT32_MAX)
positive_long = between(1, INT64_MAX)
mode = between(0, 0o777, octal=True)
user = between(0, INT32_MAX)


def one_of(*words: str) -> Rule:
    def rule(value: object) -> str | None:
        if not isinstance(value, str) or not value or value in words:
            return None
        return f"{shown(value)} is unknown; {meant(value, words)}"

    return rule


protocol = one_of("TCP", "UDP", "SCTP")
pull_policy = one_of("Always", "IfNotPresent", "Never")


def matching(pattern: str, longest: int, complaint: str) -> Rule:
    def rule(value: object) -> str | None:
        if not isinstance(value, str) or not value:
            return None
        if len(value) > longest:
            return f"{shown(value)} has {len(value)} characters; at most {longest} are allowed"
        # Compiled when first used, so that those who check nothing do not wait for it.
        return None if re.fullmatch(pattern, value) else f"{shown(value)} is {complaint}"

    return rule


_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_LABEL_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"

dns_label = matching(
    _LABEL, 63, "no DNS label; use a-z, 0-9 and '-', beginning and ending with a letter or digit"
)
subdomain = matching(
    _SUBDOMAIN,
    253,
    "no DNS name; use a-z, 0-9, '-' and '.', each part beginning and ending with a letter or digit",
)
service_name = matching(
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    63,
    "no name for a Service; use a-z, 0-9 and '-', beginning with a letter, not ending with '-'",
)
driver_name = matching(_SUBDOMAIN, 63, "no name of a driver; write it like 'csi.example.com'")
label_value = matching(
    _LABEL_VALUE,
    63,
    "no value of a label; use letters, digits, '-', '_' and '.', beginning and ending with a "
    "letter or digit",
)
env_name = matching(
    r"[-._a-zA-Z][-._a-zA-Z0-9]*",
    INT32_MAX,
    "no name of a variable; use letters, digits, '_', '-' and '.', not beginning with a digit",
)
env_prefix = matching(
    r"[A-Za-z_][A-Za-z0-9_]*",
    INT32_MAX,
    "no prefix of variables; use letters, digits and '_', not beginning with a digit",
)
absolute_path = matching(r"/[^\0]*", INT32_MAX, "no absolute path; begin with '/'")
mount_path = matching(
    r"/[^:\0]*", INT32_MAX, "no absolute path without ':'; begin with '/', and leave out ':'"
)
sysctl = matching(
    r"[a-z0-9]([-_a-z0-9]*[a-z0-9])?([./][a-z0-9]([-_a-z0-9]*[a-z0-9])?)*",
    253,
    "no name of a sysctl; write it like 'net.core.somaxconn'",
)
image = matching(
    r"[^\s]+", INT32_MAX, "no image; name one without spaces, like 'registry/name:tag'"
)
capability = matching(
    r"[A-Za-z][A-Za-z0-9_]*", 63, "no capability; write it like 'NET_BIND_SERVICE'"
)
medium = matching(
    r"Memory|HugePages(-[0-9]+[KMG]i)?", 63, "no medium; use 'Memory' or 'HugePages-2Mi'"
)
_key_characters = matching(r"[-._a-zA-Z0-9]+", 253, "no key; use letters, digits, '-', '_' and '.'")


def qualified_name(value: object) -> str | None:
    """A key of a label, and what else is named like one: `name` or `domain/name`."""
    if not isinstance(value, str):
        return None
    prefix, slash, name = value.rpartition("/")
    if slash and (not prefix or subdomain(prefix)):
        return f"{shown(value)} has no DNS name before '/'; write it like 'example.com/name'"
    if len(name) > 63 or not re.fullmatch(_LABEL_VALUE, name):
        return (
            f"{shown(value)} is no qualified name; use at most 63 letters, digits, '-', '_' and "
            "'.', beginning and ending with a letter or digit, perhaps after 'example.com/'"
        )
    return None


def annotation_key(value: object) -> str | None:
    """A key of an annotation, whose domain may have capital letters."""
    return qualified_name(value.lower() if isinstance(value, str) else value)


def controller_name(value: object) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    if "/" in value and len(value) <= 63 and not qualified_name(value):
        return None
    return (
        f"{shown(value)} names no controller; write it like 'example.com/name', with at most 63 "
        "characters"
    )


def data_key(value: object) -> str | None:
    """A key of what a Secret or a ConfigMap holds: the name of a file."""
    if isinstance(value, str) and (value in ("", ".") or value.startswith("..")):
        return f"{shown(value)} is no key; it must not be empty, '.' nor begin with '..'"
    return _key_characters(value)


def port_name(value: object) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    words = re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", value)
    if words and len(value) <= 15 and re.search(r"[a-z]", value):
        return None
    return (
        f"{shown(value)} is no name of a port; use at most 15 of a-z, 0-9 and single '-' inside, "
        "with at least one letter"
    )


def port_or_name(value: object) -> str | None:
    return port(value) if is_int(value) else port_name(value)


def path_below(value: object) -> str | None:
    """A path in a volume."""
    if not isinstance(value, str):
        return None
    if value.startswith("/"):
        return f"{shown(value)} is absolute; give it relative to the volume"
    if ".." in value.split("/"):
        return f"{shown(value)} leads out of the volume; leave out '..'"
    return None


def host_path(value: object) -> str | None:
    return "must not have '..'" if isinstance(value, str) and ".." in value.split("/") else None


def address(value: object) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    try:
        ipaddress.ip_address(value)
    except ValueError:
        valid = False
    else:
        # Python takes IPv6 addresses with a zone.
        valid = "%" not in value
    return None if valid else f"{shown(value)} is no IP address; write it like '10.0.0.7'"


def network_of(value: object) -> Network | None:
    """The block of addresses that a text means; None: it means none."""
    # Python takes masks as netmasks, too, and IPv6 addresses with a zone.
    if not isinstance(value, str) or not re.fullmatch(r"[^%/]+/[0-9]+", value):
        return None
    try:
        return ipaddress.ip_network(value, strict=False)
    except ValueError:
        return None


def cidr(value: object) -> str | None:
    if not isinstance(value, str) or network_of(value):
        return None
    return f"{shown(value)} is no block of addresses; write it like '10.0.0.0/8'"
