"""Quantities, and what containers and pods ask for in them."""

import re
from collections.abc import Container
from fractions import Fraction

from launchers._kubernetes.checks.places import Place, shown, unique
from launchers._kubernetes.checks.values import qualified_name

# Bounded, because a hostile exponent would fill the memory.
_QUANTITY = (
    r"(?P<number>[+-]?([0-9]{1,100}(\.[0-9]{0,100})?|\.[0-9]{1,100}))"
    r"([eE](?P<exponent>[+-]?[0-9]{1,3})|(?P<suffix>[numkMGTPE]|[KMGTPE]i))?"
)
_FACTORS = {
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate("num", -3)},
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
_KNOWN = ("cpu", "memory", "ephemeral-storage")


def amount(value: object) -> Fraction | None:
    """What a quantity means; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    match = re.fullmatch(_QUANTITY, str(value))
    if not match:
        return None
    number = Fraction(match["number"])
    if match["exponent"]:
        return number * Fraction(10) ** int(match["exponent"])
    return number * _FACTORS[match["suffix"]] if match["suffix"] else number


def quantity(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    number = amount(value)
    if number is None:
        return f"{shown(value)} is no quantity; write it like '500m', '2', '512Mi' or '2Gi'"
    return f"{shown(value)} is negative; give 0 or more" if number < 0 else None


def check_resources(resources: Place, claims: Container[str]) -> None:
    """Checks what a container asks for.

    Args:
        resources: Where it asks.
        claims: Names of the pod's resource claims.
    """
    for kind in ("limits", "requests"):
        resources[kind].keys_obey(_resource_name)
        for name, each in resources[kind].entries:
            each.obey(quantity)
            number = amount(each.value)
            if _is_device(name) and number is not None and number.denominator > 1:
                each.wrong(f"{shown(each.value)} is no whole number; {name} cannot be shared")
    limits, requests = dict(resources["limits"].entries), dict(resources["requests"].entries)
    for name, request in requests.items():
        _check_limit(name, request, limits.get(name))
    names = {*limits, *requests}
    if any(map(_is_huge, names)) and not names & {"cpu", "memory"}:
        resources.wrong("huge pages need cpu or memory, too")
    unique(resources.select("claims[].name"), "claim it once")
    for claim in resources.select("claims[].name"):
        if claim.text and claim.text not in claims:
            claim.wrong(f"{shown(claim.value)} is not among resourceClaims of the pod")


def _check_limit(name: str, request: Place, limit: Place | None) -> None:
    exact = _is_device(name) or _is_huge(name)
    asked, allowed = amount(request.value), amount(limit.value) if limit else None
    unequal = f"must be equal to limits, because {name} cannot be overcommitted"
    if limit is None:
        if exact:
            request.wrong(unequal)
    elif asked is None or allowed is None or asked == allowed:
        return
    elif exact:
        request.wrong(unequal)
    elif asked > allowed:
        request.wrong(f"{shown(request.value)} is above limits, {shown(limit.value)}; lower it")


def _is_device(name: str) -> bool:
    """Whether a resource is an extended one."""
    return "/" in name and "kubernetes.io/" not in name


def _is_huge(name: str) -> bool:
    return name.startswith("hugepages-")


def _resource_name(name: object) -> str | None:
    if not isinstance(name, str) or (complaint := qualified_name(name)):
        return complaint
    if "/" in name:
        return "begins with 'requests.'; leave that out" if name.startswith("requests.") else None
    if name in _KNOWN or (_is_huge(name) and amount(name.removeprefix("hugepages-"))):
        return None
    return f"unknown resource; known are {', '.join(_KNOWN)} and those like 'nvidia.com/gpu'"
