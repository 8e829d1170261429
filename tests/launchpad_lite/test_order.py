"""In which order nodes stop, against an oracle that tries all paths."""

import itertools
import sys

from hypothesis import given, settings, strategies as st

from launchpad_lite.life._order import StopOrder

Calls = dict[str, list[str]]


@st.composite
def graphs(draw: st.DrawFn) -> Calls:
    """Graphs of up to 8 nodes; nodes may call themselves, and others more than once."""
    names = [f"n{index}" for index in range(draw(st.integers(0, 8)))]
    if not names:
        return {}
    return {name: draw(st.lists(st.sampled_from(names), max_size=3)) for name in names}


class Oracle:
    """The order, the slow and plain way."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.below = {name: set(callees) for name, callees in calls.items()}
        for middle, first in itertools.product(calls, calls):
            if middle in self.below[first]:
                self.below[first] |= self.below[middle]

    def circle(self, name: str) -> set[str]:
        return {name} | {each for each in self.below[name] if name in self.below[each]}

    def callers(self, name: str) -> set[str]:
        circle = self.circle(name)
        return {
            caller
            for caller, callees in self.calls.items()
            if caller not in circle and circle & set(callees)
        }

    def wave(self, name: str) -> int:
        return max((1 + self.wave(caller) for caller in self.callers(name)), default=0)


@settings(max_examples=200)
@given(graphs())
def test_the_order_is_that_of_the_oracle(calls: Calls) -> None:
    order, oracle = StopOrder(calls), Oracle(calls)
    assert order.waves == max((1 + oracle.wave(name) for name in calls), default=0)
    for name in calls:
        callers = order.callers[name]
        assert set(callers) == oracle.callers(name)
        assert len(callers) == len(set(callers))
        assert order.below(name) == oracle.below[name]


def test_long_chains_and_circles_need_no_deep_recursion() -> None:
    names = [f"n{index}" for index in range(10_000)]
    assert len(names) > sys.getrecursionlimit()
    chain = {name: [callee] for name, callee in itertools.pairwise(names)} | {names[-1]: []}
    for calls in (chain, dict(reversed(chain.items()))):
        order = StopOrder(calls)
        assert order.waves == len(names)
        assert order.callers[names[-1]] == [names[-2]]
        assert len(order.below(names[0])) == len(names) - 1
    circle = StopOrder(chain | {names[-1]: [names[0]]})
    assert circle.waves == 1
    assert not any(circle.callers.values())
