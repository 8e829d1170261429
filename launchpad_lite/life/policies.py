"""Options for the life of a node: when it restarts, and how it shows that it is not hung."""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launchpad_lite.parts.settings import check_number, check_quantity, made_from


class RestartWhen(enum.Enum):
    """The ends of a node after which it restarts."""

    NEVER = "never"
    ON_FAILURE = "on_failure"
    ALWAYS = "always"  # also when its `run` returned


@dataclass(frozen=True)
class RestartPolicy:
    """Whether and how often a node is restarted.

    A restarted node keeps its label, replica and address. It is constructed again, and loses its
    state unless it has checkpoints. When it failed more often than the policy allows, the program
    fails.

    Attributes:
        when: `"never"` (a failure ends the program), `"on_failure"`, or `"always"`: also when the
            node ended well. Such a node never counts as having ended, so its program runs until
            it is stopped.
        max_restarts: How many failures within `window_s` lead to a restart. A node that was asked
            from outside to end (SIGTERM) did not fail.
        window_s: Seconds after which a failure is forgotten.
        backoff_s: Seconds before the first restart; doubled with each further failure in the
            window, and each time that the node ended well soon after its start (`"always"`).
        max_backoff_s: Seconds beyond which it is not doubled. Shorter runs count as ending soon.
        jitter: Part of the delay by which it varies at random, so that nodes that failed together
            do not restart together: 0.2 means 80 % to 120 %.
        moves: Whether it is started on another host when its host is lost. If not, the program
            fails: the node's files on its host are out of reach.

    Example:
        policy = lp.RestartPolicy("on_failure", max_restarts=10, window_s=3600, backoff_s=1)
        lp.launch(program, restart={"actor": policy})
    """

    when: RestartWhen | str = RestartWhen.ON_FAILURE
    max_restarts: int = 3
    window_s: float = 600.0
    backoff_s: float = 0.1
    max_backoff_s: float = 30.0
    jitter: float = 0.2
    moves: bool = True

    def __post_init__(self) -> None:
        try:
            when = RestartWhen(self.when)
        except ValueError:
            known = ", ".join(repr(each.value) for each in RestartWhen)
            raise ValueError(f"a restart policy is one of {known}, not {self.when!r}") from None
        object.__setattr__(self, "when", when)
        check_number("max_restarts", self.max_restarts, 0)
        window_s = check_quantity("window_s", self.window_s, positive=True, infinite=True)
        object.__setattr__(self, "window_s", window_s)
        for name in ("backoff_s", "max_backoff_s", "jitter"):
            object.__setattr__(self, name, check_quantity(name, getattr(self, name)))
        if self.jitter > 1:
            raise ValueError(f"jitter is a part of the delay, 0 to 1, not {self.jitter}")
        if not isinstance(self.moves, bool):
            raise TypeError(f"moves is True or False, not {self.moves!r}")

    @classmethod
    def of(cls, given: "RestartPolicy | RestartWhen | str | Mapping[str, Any]") -> "RestartPolicy":
        """Takes a policy as users write it: `"on_failure"` or `{"when": "always", ...}` too."""
        if isinstance(given, RestartWhen | str):
            return cls(given)
        return made_from(cls, given, "lp.RestartPolicy, its name")

    def delay_s(self, failures: int, chance: float) -> float:
        """Returns how long to wait after failures; `chance` is evenly distributed from 0 to 1."""
        # 2.0 ** 1024 overflows a float; 0 times anything is 0.
        delay = self.backoff_s * 2.0 ** min(max(0, failures - 1), 1023)
        return min(delay, self.max_backoff_s) * (1 + self.jitter * (2 * chance - 1))

    @property
    def outlives_host(self) -> bool:
        return self.when is not RestartWhen.NEVER and self.moves

    def __str__(self) -> str:
        if self.when is RestartWhen.NEVER:
            return ""
        text = f"restart={RestartWhen(self.when).value}, at most {self.max_restarts} in {self.window_s:g} s"
        return text if self.moves else f"{text}, moves=False"


@dataclass(frozen=True)
class Liveness:
    """How a node must show that it is not hung. None: it need not.

    A node that exceeds a limit counts as failed: the stacks of its threads are written down, it is
    ended by force, and its restart policy applies.

    Attributes:
        health_s: Seconds within which its courier must answer a health check. Of nodes that serve
            nothing, the process must answer. A server whose threads are all taken for so long, while
            calls wait, does not: choose more than calls take, or call `lp.heartbeat()` in them.
        heartbeat_s: Seconds within which its code must call `lp.heartbeat()` again.
        startup_s: Seconds its constructor may take.

    Example:
        lp.launch(program, liveness={"learner": lp.Liveness(heartbeat_s=60, startup_s=300)})
    """

    health_s: float | None = None
    heartbeat_s: float | None = None
    startup_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                object.__setattr__(self, name, check_quantity(name, value, positive=True))

    @property
    def heartbeat_report_s(self) -> float | None:
        """Seconds between reports of heartbeats: not each of the many calls is reported."""
        return None if self.heartbeat_s is None else self.heartbeat_s / 20

    @property
    def heartbeat_deadline_s(self) -> float | None:
        """Seconds between reports after which a node is hung: not each call is reported."""
        return None if self.heartbeat_s is None else self.heartbeat_s * (1 + 1 / 20)

    @classmethod
    def of(cls, given: "Liveness | Mapping[str, Any]") -> "Liveness":
        """Takes limits as users write them: `{"heartbeat_s": 30}` too."""
        return made_from(cls, given, "lp.Liveness, as lp.Liveness(heartbeat_s=30),")

    def __str__(self) -> str:
        limits = dataclasses.asdict(self).items()
        return ", ".join(f"{name}={value:g}" for name, value in limits if value is not None)


NEVER = RestartPolicy(RestartWhen.NEVER)
