"""Which methods are fast enough to run where their call was read, or made."""

#: A method faster than this, on average, saves two hops between threads.
FAST_S = 0.0005
#: Of a method that is faster than this, runs that are so too need no note: that takes time as well.
VERY_FAST_S = 0.0001
#: The assumed cost of a method before its first call; it has to show that it is fast.
_UNKNOWN_S = 0.001
#: One slow run must not outweigh many fast ones for long.
_SLOWEST_S = 0.01
_WEIGHT = 0.2


class MethodCosts:
    """What methods have cost lately. Thread-safe: an update that is lost does no harm."""

    def __init__(self) -> None:
        self._costs: dict[str, float] = {}

    def of(self, method: str) -> float:
        """Returns the seconds that a method takes."""
        return self._costs.get(method, _UNKNOWN_S)

    def learn(self, method: str, took_s: float) -> None:
        """Takes note of one run; an exponential average with a limit."""
        cost = self._costs.get(method, _UNKNOWN_S)
        self._costs[method] = cost + _WEIGHT * (min(took_s, _SLOWEST_S) - cost)
