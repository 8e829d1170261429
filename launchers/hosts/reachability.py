"""Chooses the address of each host, from those by which others have reached it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: The name of the launching process as a caller; it is no host.
LAUNCHER = ""


@dataclass(frozen=True)
class Views:
    """How each host, and the launcher, calls the others."""

    addresses: Mapping[str, Mapping[str, str]]  # by caller, which may be `LAUNCHER`, and host
    tried: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by host

    def address(self, caller: str, host: str) -> str | None:
        """Returns how a caller reaches a host; None: not at all."""
        return self.addresses.get(caller, {}).get(host)

    def missing(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return sorted({pair for pair in pairs if self.address(*pair) is None})


def same_for_all(names: Mapping[str, str]) -> Views:
    """Returns views in which all callers use the same name of a host."""
    return Views(dict.fromkeys((LAUNCHER, *names), names))


def choose_addresses(
    candidates: Mapping[str, Sequence[str]], reached: Mapping[str, Mapping[str, Sequence[str]]]
) -> Views:
    """Chooses one address of each host for all callers that can use it, and another for each of the rest.

    One address for all is best: nodes may hand clients to each other, and these then reach the same
    host. The likeliest candidate comes first.
    """
    views: dict[str, dict[str, str]] = {caller: {} for caller in reached}
    for host, addresses in candidates.items():
        callers = [caller for caller in reached if caller != host]
        common = max(
            addresses,
            key=lambda each: sum(each in reached[caller].get(host, ()) for caller in callers),
            default=None,
        )
        for caller in callers:
            usable = reached[caller].get(host, ())
            if common in usable:
                views[caller][host] = str(common)
            elif usable:
                views[caller][host] = usable[0]
        if common is not None:
            # Its own nodes call it as others do, so that a client is the same everywhere.
            views.setdefault(host, {})[host] = common
    return Views(views, candidates)
