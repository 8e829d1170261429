"""How long the parts of a search wait for each other."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Limits of a search, in seconds.

    Attributes:
        lease_s: For which a broker leaves a task to a silent worker.
        beat_s: Between two heartbeats: of workers to brokers, and of all to the name server.
        silence_s: Until the name server drops a silent participant.
        patience_s: For which a model waits for its broker to come back before it goes to another
            one.
        poll_s: For which a call waits for news, before it is made again.

    Example:
        search.run(model, timing=search.Timing(lease_s=60.0, beat_s=5.0, silence_s=30.0))
    """

    lease_s: float = 10.0
    beat_s: float = 1.0
    silence_s: float = 5.0
    patience_s: float = 5.0
    poll_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.beat_s <= min(self.lease_s, self.silence_s):
            raise ValueError(
                "Timing: two heartbeats (beat_s) fit into lease_s and silence_s; got "
                f"{self.beat_s:g}, {self.lease_s:g} and {self.silence_s:g} s"
            )
        if self.patience_s < 0 or not self.poll_s > 0:
            raise ValueError("Timing: patience_s is at least 0, and poll_s above 0")


DEFAULT = Timing()
#: Seconds until a part that did not answer, or a store that is in use, is tried again.
RETRY_S = 0.1
