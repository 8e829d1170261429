"""Looking before sleeping: while it pays, and seldom while it does not."""

import itertools

from courier.wire.watching import Events, Spin

_LOOK_S = 2e-6


class Other:
    """The other side: its answer comes after some seconds, by a clock that only looks move."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.spin = Spin(lambda: self.now_s)

    def wait(self, takes_s: float, look_s: float = _LOOK_S) -> tuple[Events, int]:
        """Returns what is found before one sleeps, and the number of looks."""
        looks = 0
        comes_at = self.now_s + takes_s

        def poll(timeout: float) -> Events:
            nonlocal looks
            assert timeout == 0
            looks += 1
            self.now_s += look_s
            return [(7, 1)] if self.now_s >= comes_at else []

        return self.spin.look(poll), looks

    def looks_of(self, waits: int, takes_s: float, look_s: float = _LOOK_S) -> list[bool]:
        """Returns for each of so many waits whether there was a look."""
        return [self.wait(takes_s, look_s)[1] > 0 for _ in range(waits)]


def test_what_comes_within_a_moment_is_found_each_time() -> None:
    other = Other()
    for _ in range(100):
        found, looks = other.wait(20e-6)
        assert found == [(7, 1)]
        assert looks > 5


def test_while_looks_are_in_vain_there_are_twice_as_few_each_time() -> None:
    other = Other()
    looks = other.looks_of(1_000, 1.0)
    at = [wait for wait, looked in enumerate(looks) if looked]
    assert [after - before for before, after in itertools.pairwise(at)] == [
        *(2, 3, 5, 9, 17, 33, 65),
        *[65] * (len(at) - 8),
    ]
    # It takes at most a moment each time, and one that pays makes up for all that did not.
    assert other.now_s < len(at) * 103e-6
    while not other.wait(20e-6)[0]:
        pass
    assert other.wait(20e-6)[0]
    assert other.looks_of(3, 1.0) == [True, False, True]


def test_what_comes_while_another_thread_has_the_core_for_a_moment_is_found() -> None:
    other = Other()
    for _ in range(3):
        assert other.wait(60e-6, look_s=30e-6) == ([(7, 1)], 2)


def test_what_is_found_after_a_moment_was_not_worth_it() -> None:
    # Another thread had the core, or the interpreter: sleeping would have been better.
    other = Other()
    assert other.wait(20e-6, look_s=110e-6) == ([(7, 1)], 1)
    assert other.looks_of(5, 20e-6, look_s=110e-6) == [*(False, True), *(False, False, True)]
