"""The order in which nodes stop: callers before their callees. Pure."""

from collections.abc import Iterator, Mapping, Sequence

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
        # Callees come before their callers here; the waves are counted the other way.
        for circle in reversed(list(_circles(calls))):
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
    """Yields the strongly connected components, callees before their callers."""
    # Tarjan's algorithm, without recursion: a chain of calls may be long.
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    closed: set[str] = set()
    open_nodes: list[str] = []
    for start in calls:
        path: list[tuple[str, Iterator[str]]] = []
        entered: str | None = start if start not in number else None
        while path or entered is not None:
            if entered is not None:
                number[entered] = lowest[entered] = len(number)
                open_nodes.append(entered)
                path.append((entered, iter(calls[entered])))
            name, callees = path[-1]
            entered = next((each for each in callees if each not in closed), None)
            if entered is not None:
                if entered in number:  # it calls back into its own circle
                    lowest[name] = min(lowest[name], number[entered])
                    entered = None
                continue
            path.pop()
            if path:
                caller = path[-1][0]
                lowest[caller] = min(lowest[caller], lowest[name])
            if lowest[name] == number[name]:
                circle = {open_nodes.pop()}
                while name not in circle:
                    circle.add(open_nodes.pop())
                closed |= circle
                yield circle
