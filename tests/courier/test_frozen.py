"""The memory of shared values: given back, and used again when nobody looks at it."""

import gc
import os
from typing import Any

import numpy as np
import pytest

import courier
from courier import _frozen
from tests.courier.conftest import Script, Serve
from tests.courier.shared_memory import descriptors, maps
from tests.courier.waiting import wait_until

_SIZE = 1 << 17  # of eight bytes each: more than what is sent inline


#: Source of a process that holds what `params` of a server returned. For each line it reads, it
#: says whether that is still what it was.
_HOLDER = """
import numpy as np
client = courier.Client(sys.argv[1], secret=secret)
held = client.params()
print(int(held[0]), flush=True)
sys.stdin.readline()
print(bool((held == held[0]).all()), int(held[-1]), flush=True)
sys.stdin.readline()
"""


class Learner:
    def __init__(self, value: Any = None) -> None:
        self.shared: Any = courier.Shared(value)

    def params(self) -> Any:
        return self.shared

    def echo(self, value: Any) -> Any:
        return value


@pytest.fixture(autouse=True)
def _begin_without_garbage() -> None:
    gc.collect()
    _frozen.tidy(0.0)


def _inodes() -> set[int]:
    return {os.fstat(memory.descriptor).st_ino for memory in _frozen._idle}


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_memory_is_used_again_when_its_last_reader_has_gone(
    serve: Serve, script: Script, ends: str
) -> None:
    learner = Learner(np.full(_SIZE, 7))
    server, client = serve(learner)
    holder = script(_HOLDER, server.address)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "7\n"
    learner.shared = None
    client.params()  # whoever answered the holder holds nothing any more
    wait_until(lambda: server.handlers.is_idle)
    wait_until(lambda: gc.collect() is not None and len(_inodes()) == 1)
    (first,) = _inodes()
    learner.shared = courier.Shared(np.full(_SIZE, 8))
    client.params()
    assert _inodes() == {first}  # it is looked at, so that the new value lies elsewhere
    if ends == "killed":
        holder.kill()
    holder.communicate("\n\n" if ends == "by itself" else None, timeout=60)
    kept = learner.shared
    learner.shared = courier.Shared(np.full(_SIZE, 9))
    value = client.params()
    assert _inodes() == set()
    assert int(value[-1]) == 9
    assert int(kept.value[-1]) == 8


def _all_is_given_back(before: tuple[int, int]) -> bool:
    _frozen.tidy(0.0)  # what waits to be used again
    return maps() <= before[0] and descriptors() <= before[1]


def test_the_memory_goes_when_the_last_reference_goes(serve: Serve) -> None:
    before = maps(), descriptors()
    learner = Learner([np.arange(_SIZE), np.ones(10)])
    _, client = serve(learner)
    client.params()
    assert descriptors() > before[1]
    value = client.params()
    learner.shared = None
    gc.collect()
    np.testing.assert_array_equal(value[0], np.arange(_SIZE))
    value[0][:] = 1
    del value
    gc.collect()
    wait_until(lambda: _all_is_given_back(before))


def test_a_learner_that_shares_anew_each_step_holds_few_at_a_time(serve: Serve) -> None:
    before = maps(), descriptors()
    learner = Learner()
    _, client = serve(learner)
    for step in range(100):
        learner.shared = courier.Shared(np.full(_SIZE, step))
        assert int(client.params()[-1]) == step
        assert descriptors() <= before[1] + 40
    learner.shared = None
    client.params()
    gc.collect()
    wait_until(lambda: _all_is_given_back(before))


@pytest.mark.parametrize("count", [63, 65, 260])
def test_hundreds_may_be_in_one_message(serve: Serve, count: int) -> None:
    before = descriptors()
    values = [courier.Shared(np.full(1 << 15, index)) for index in range(count)]
    _, client = serve(Learner(), client={"call_timeout": 30})
    results = client.echo(values)
    assert [int(result[-1]) for result in results] == list(range(count))
    del values, results
    client.echo(1)
    gc.collect()
    wait_until(lambda: _all_is_given_back((maps(), before)))
