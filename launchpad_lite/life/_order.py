"""The order in which nodes stop: callers before their callees. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

Calls = Mapping[str, Sequence[str]]


class StopOrder:
    """The order of a stop. Nodes that call each other in a circle stop together."""

    def __init__(self, calls: Calls) -> None:
        """Finds the order. All nodes, also those that call none, are keys of `calls`."""
        self._calls = calls
        #: For each node, those that stop before it: callers of it, or of one of its circle.
        self.callers: dict[str, list[str]] = {name: [] for name in calls}
        self.waves = 0  # the number of steps of the stop
        wave: dict[str, int] = {}
        for circle in _circles(calls):
            own = max((wave.get(member, 0) for member in circle), default=0)
            self.waves = max(self.waves, own + 1)
            # All its callers are done.
            callers = list(dict.fromkeys(each for name in circle for each in self.callers[name]))
            for member in circle:
                self.callers[member] = callers
                for callee in calls[member]:
                    if callee not in circle:
                        self.callers[callee].append(member)
                        wave[callee] = max(wave.get(callee, 0), own + 1)
        #: For each node, those that stop after it.
        self.callees: dict[str, list[str]] = {name: [] for name in calls}
        for name, callers in self.callers.items():
            for caller in callers:
                self.callees[caller].append(name)

    def below(self, name: str) -> set[str]:
        """Returns all nodes that a node calls, directly or indirectly."""
        found: set[str] = set()
        ahead = list(self._calls[name])
        while ahead:
            each = ahead.pop()
            if each not in found:
                found.add(each)
                ahead += self._calls[each]
        return found


def _circles(calls: Calls) -> Iterator[set[str]]:
    """Returns the strongly connected components, callers before their callees."""
    # Kosaraju's algorithm: what is left last reaches all of its circle, which also reaches it.
    left = [name for walk in _walks(calls, calls) for name in walk]
    callers: dict[str, list[str]] = {name: [] for name in calls}
    for name, callees in calls.items():
        for callee in callees:
            callers[callee].append(name)
    return map(set, _walks(callers, reversed(left)))


def _walks(calls: Calls, starts: Iterable[str]) -> Iterator[list[str]]:
    """Yields what each start reaches, and no earlier one did, in the order in which it is left."""
    seen: set[str] = set()
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        walk: list[str] = []
        path = [(start, iter(calls[start]))]
        while path:  # no recursion: a chain of calls may be long
            _, callees = path[-1]
            following = next((each for each in callees if each not in seen), None)
            if following is None:
                walk.append(path.pop()[0])
            else:
                seen.add(following)
                path.append((following, iter(calls[following])))
        yield walk
