"""Which of its addresses a host is called by: the one by which others have reached it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: Who looks at hosts without being one: the process that launches.
LAUNCHER = ""


@dataclass(frozen=True)
class Views:
    """How each host, and the launcher, calls the others.

    Attributes:
        addresses: Address by who calls, and whom; `LAUNCHER` calls as well.
        tried: What was tried of each host.
    """

    addresses: Mapping[str, Mapping[str, str]]
    tried: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def address(self, caller: str, host: str) -> str | None:
        """Returns how a caller reaches a host; None: not at all."""
        return self.addresses.get(caller, {}).get(host)

    def missing(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Returns those pairs of caller and host of which the caller does not reach the host."""
        return sorted({pair for pair in pairs if self.address(*pair) is None})


class SameForAll(Views):
    """All callers use the same name of a host."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """Takes the names by host."""
        super().__init__({LAUNCHER: names})

    def address(self, caller: str, host: str) -> str | None:  # noqa: ARG002 - the same for all
        """Returns how a host is reached."""
        return self.addresses[LAUNCHER].get(host)


def choose_addresses(
    candidates: Mapping[str, Sequence[str]],
    reached: Mapping[str, Mapping[str, Sequence[str]]],
) -> Views:
    """Chooses one address of each host for all who can use it, else the best for each.

    One for all is best: clients that nodes hand to one another lead to the same place anywhere.

    Args:
        candidates: Addresses of each host, the likeliest first.
        reached: Those by which each caller has reached each other host.
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
