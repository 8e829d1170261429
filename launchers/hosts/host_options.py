"""Options of users for hosts, for any command that reaches them."""

import enum
from dataclasses import dataclass
from pathlib import Path

from launchers.hosts.host_list import mistakes_in_words
from launchers.hosts.placement import PlacementChoice, Strategy


class Tunnel(enum.Enum):
    """When calls between hosts go through the links of their agents, by way of the launcher."""

    AUTO = "auto"  # where a host does not reach another
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True)
class HostOptions:
    """A user's options for all hosts, as `HostsLauncher` explains them; `requirements` is text."""

    placement: PlacementChoice = None
    strategy: Strategy = Strategy.SPREAD
    tunnel: Tunnel = Tunnel.AUTO
    python: str | None = None
    requirements: str | None = None
    cache: str | None = None
    silence_s: float = 8.0

    def mistakes(self) -> list[str]:
        """Returns a mistake for each option that is invalid."""
        found = [*mistakes_in_words(python=self.python, cache=self.cache)]
        if not self.silence_s >= 1:
            found.append(f"silence_s is at least 1 s, not {self.silence_s}")
        return found


def read_requirements(path: str | Path | None) -> str | None:
    """Returns the text of a file of requirements, if there is one."""
    try:
        return None if path is None else Path(path).read_text()
    except OSError as error:
        raise ValueError(f"cannot read the requirements: {error}") from error
