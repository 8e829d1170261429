import asyncio
import concurrent.futures
import gc
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import courier
from courier.values import frozen
from tests.courier.conftest import Connect, Script, Serve, go_by
from tests.courier.fuzzing import resident_bytes
from tests.courier.shared_memory import descriptors, maps
from tests.courier.waiting import wait_until

_SIZE = 1 << 17  # of eight bytes each: more than what is sent inline


class Counted:
    """Counts how often it is pickled, and how often a copy of it is made."""

    pickled = 0

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getstate__(self) -> dict[str, Any]:
        type(self).pickled += 1
        return dict(self.__dict__)


class Learner:
    def __init__(self, value: Any = None) -> None:
        self.shared: Any = courier.Shared(value)

    def params(self) -> Any:
        return self.shared

    def nested(self) -> Any:
        return {"step": 3, "all": [self.shared, (self.shared, np.zeros(3))]}

    def rounds(self, count: int) -> Iterator[Any]:
        for index in range(count):
            yield index, self.shared

    def echo(self, value: Any) -> Any:
        return value

    def describe(self, value: Any) -> tuple[str, int]:
        return type(value).__name__, int(value["w"].sum())

    def replace(self, value: Any) -> None:
        self.shared = courier.Shared(value)


@pytest.fixture(autouse=True)
def _begin_anew() -> None:
    Counted.pickled = 0
    gc.collect()
    frozen.tidy(0.0)


@pytest.fixture(params=["unix", "tcp", "grpc", "copy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By which way clients connect; options of the server."""
    return go_by(request.param, monkeypatch)


@pytest.fixture(params=["unix", "copy"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same for one way between processes, and one within."""
    return go_by(request.param, monkeypatch)


def _params() -> dict[str, Any]:
    return {"w": np.arange(_SIZE), "b": [np.ones(10), "text"], "empty": np.zeros(0)}


def _check(value: Any) -> None:
    np.testing.assert_array_equal(value["w"], np.arange(_SIZE))
    np.testing.assert_array_equal(value["b"][0], np.ones(10))
    assert value["b"][1] == "text"
    assert value["empty"].shape == (0,)


def test_the_other_side_receives_the_value_itself(serve: Serve, way: dict[str, Any]) -> None:
    _, client = serve(Learner(_params()), **way)
    _check(client.params())
    _check(client.futures.params().result(20))
    _check(asyncio.run(client.aio.params()))


def test_it_may_be_anywhere_in_results_items_arguments_exceptions_and_another_one(
    serve: Serve, side: dict[str, Any]
) -> None:
    shared = courier.Shared(_params())

    def fail() -> None:
        raise ValueError(shared)

    learner = Learner(_params())
    server, client = serve(learner, **side)
    server.bind("fail", fail)
    result = client.nested()
    assert result["step"] == 3
    _check(result["all"][0])
    _check(result["all"][1][0])
    np.testing.assert_array_equal(result["all"][1][1], np.zeros(3))
    for expected, (index, value) in enumerate(client.rounds(5)):
        assert index == expected
        _check(value)
    assert client.describe(shared) == ("dict", _SIZE * (_SIZE - 1) // 2)
    assert client.describe(value=shared) == ("dict", _SIZE * (_SIZE - 1) // 2)
    _check(client.echo([shared])[0])
    with pytest.raises(ValueError, match=r"\w") as caught:
        client.fail()
    _check(caught.value.args[0])
    learner.shared = courier.Shared([shared, np.full(_SIZE, 3)])
    first, second = client.params()
    _check(first)
    assert (second == 3).all()


def test_it_is_serialised_once_however_many_ask(serve: Serve, side: dict[str, Any]) -> None:
    _, client = serve(Learner(Counted(np.arange(_SIZE))), **side)
    clients = [courier.with_timeout(client, 60) for _ in range(4)]
    start = threading.Barrier(12)

    def ask(index: int) -> int:
        start.wait(20)
        return int(clients[index % 4].params().array.sum())

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert set(pool.map(ask, range(12))) == {_SIZE * (_SIZE - 1) // 2}
    client.nested()
    list(client.rounds(5))
    assert Counted.pickled == 1
    for each in clients:
        courier.close(each)


def test_the_value_is_taken_as_it_is_when_it_is_first_sent(
    serve: Serve, side: dict[str, Any]
) -> None:
    value = Counted(np.zeros(_SIZE))
    learner = Learner(value)
    _, client = serve(learner, **side)
    value.array[0] = 5
    assert Counted.pickled == 0
    assert client.params().array[0] == 5
    value.array[0] = 6
    assert client.params().array[0] == 5
    assert learner.shared.value is value


def test_a_value_that_cannot_be_pickled_is_a_serialization_error(
    serve: Serve, side: dict[str, Any]
) -> None:
    _, client = serve(Learner(threading.Lock()), **side)
    for _ in range(2):
        with pytest.raises(courier.SerializationError, match="lock"):
            client.params()
    with pytest.raises(courier.SerializationError, match="lock"):
        client.echo(courier.Shared(threading.Lock()))
    assert client.echo(1) == 1


def test_any_value_may_be_shared(serve: Serve, side: dict[str, Any]) -> None:
    _, client = serve(Learner(None), **side)
    before = maps()
    for value in (None, 0, b"", [], np.zeros(0), [np.arange(3)], b"x" * (1 << 20)):
        client.replace(value)
        result = client.params()
        assert type(result) is type(value)
        assert np.array_equal(result, value)
        assert maps() <= before  # only large buffers are worth a segment
    client.replace(lambda value: value + 1)  # as pickle alone cannot
    assert client.params()(2) == 3


def _spoil(value: Any) -> int:
    value["w"][:] = -1
    value["b"][0][:] = -1
    return int(value["w"][3])


def test_readers_may_write_and_harm_nobody(serve: Serve, way: dict[str, Any]) -> None:
    learner = Learner(_params())
    server, client = serve(learner, **way)
    server.bind("spoil", _spoil)
    first, second = client.params(), client.params()
    _spoil(first)
    _check(second)
    _check(client.params())
    assert (first["w"] == -1).all()
    assert client.spoil(learner.shared) == client.spoil(learner.shared) == -1
    _check(learner.shared.value)


def test_arrays_that_are_read_only_stay_so_and_others_do_not(
    serve: Serve, side: dict[str, Any]
) -> None:
    def array(size: int, *, writeable: bool) -> Any:
        made = np.ones(size)
        made.flags.writeable = writeable
        return made

    value = [array(size, writeable=w) for size in (10, _SIZE) for w in (False, True)]
    _, client = serve(Learner(value), **side)
    assert [part.flags.writeable for part in client.params()] == [False, True, False, True]


@pytest.mark.parametrize(("carrier", "mapped_each"), [("unix", 1), ("tcp", 0)])
def test_readers_of_the_same_host_map_what_is_shared_and_others_get_the_bytes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, carrier: str, mapped_each: int
) -> None:
    _, client = serve(Learner(_params()), **go_by(carrier, monkeypatch))
    client.params()

    def each_maps_it_so_often() -> bool:
        gc.collect()
        before = maps()
        kept = [client.params() for _ in range(5)]
        mapped = maps()
        for value in kept:
            _check(value)
        del value
        kept.clear()
        gc.collect()
        return (mapped, maps()) == (before + 5 * mapped_each, before)

    # Other threads may still hold what they brought, or drop it just then.
    wait_until(each_maps_it_so_often)


_READER = """
import os, numpy as np
client = courier.Client(sys.argv[1], secret=secret, call_timeout=60)
for _ in range(int(sys.argv[2])):
    value = client.params()
    value["w"][:10] = -1
print(int(value["w"][10]), flush=True)
sys.stdin.readline()
print(int(value["w"].sum()), "shared" in open("/proc/self/maps").read(), flush=True)
"""


@pytest.mark.slow
def test_many_reads_leave_the_memory_of_the_server_as_it_is(serve: Serve, script: Script) -> None:
    count = 1 << 21
    server, client = serve(Learner({"w": np.ones(count)}))
    client.params()
    script("courier.Client(sys.argv[1], secret=secret).params()", server.address).wait(60)
    gc.collect()
    before = maps(), descriptors(), resident_bytes()
    readers = [script(_READER, server.address, 100) for _ in range(2)]
    for reader in readers:
        assert reader.line() == "1"
    gc.collect()
    wait_until(lambda: maps() <= before[0] and descriptors() <= before[1])
    assert resident_bytes() - before[2] < 8 * count
    for reader in readers:
        assert reader.output("\n") == f"{count - 20} True"


def test_values_replaced_while_others_read_are_never_torn(serve: Serve, connect: Connect) -> None:
    learner = Learner(np.zeros(_SIZE))
    server, _ = serve(learner)
    over = threading.Event()

    def read(client: Any) -> int:
        last = 0
        while not over.is_set():
            array = client.params()
            assert (array == array[0]).all()
            assert array[0] >= last
            last = int(array[0])
            array[:] = -1
        return last

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read, connect(server.address)) for _ in range(3)]
        try:
            for step in range(1, 100):
                learner.shared = courier.Shared(np.full(_SIZE, float(step)))
                learner.params()
        finally:
            over.set()
        for reader in readers:
            assert reader.result(30) <= 99


def test_what_was_received_may_be_shared_on_or_sent_back(serve: Serve) -> None:
    _, client = serve(Learner(_params()))
    value = client.params()
    value["w"][0] = 7
    back = client.echo(value)
    assert back["w"][0] == 7
    np.testing.assert_array_equal(back["w"][1:], np.arange(1, _SIZE))
    _, onward = serve(Learner(value))
    received = onward.params()
    assert received["w"][0] == 7
    received["w"][1] = 8
    assert value["w"][1] == 1
    _check(client.params())


def test_who_shares_objects_with_the_other_side_gets_the_value_itself(serve: Serve) -> None:
    params = _params()
    _, client = serve(Learner(params), in_process="share")
    assert client.params() is params
    assert client.describe(courier.Shared(params))[0] == "dict"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_its_pickle_is_that_of_the_value_and_its_arrays_may_be_written(protocol: int) -> None:
    shared = courier.Shared(_params())
    for _ in range(2):
        value = pickle.loads(pickle.dumps([shared], protocol))[0]
        _check(value)
        value["w"][:] = -1
        value["b"][0][:] = -1


_FORK = """
import os, pickle, gc, numpy as np
shared = courier.Shared(np.full(1 << 18, 1.0))
kept = []
data = pickle.dumps(shared, 5, buffer_callback=kept.append)
child = os.fork()
with courier.Server(lambda: shared, secret=secret, in_process="wire") as server:
    client = courier.Client(server.address, secret=secret)
    ok = bool((client() == 1).all())
    courier.close(client)
if child == 0:
    kept.clear()
    del shared
    gc.collect()
    for step in range(5):
        other = courier.Shared(np.full(1 << 18, 2.0))
        pickle.dumps(other, 5, buffer_callback=lambda buffer: None)
    os._exit(0 if ok else 1)
print(os.waitpid(child, 0)[1], ok, bool((pickle.loads(data, buffers=kept) == 1).all()))
"""


def test_a_forked_child_goes_on_with_it_and_does_not_write_to_what_its_parent_shares(
    script: Script,
) -> None:
    assert script(_FORK).output() == "0 True True"


def test_where_there_is_no_memory_without_a_name_it_is_sent_as_all_else(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no more descriptors")

    monkeypatch.setattr(os, "memfd_create", refuse)
    _, client = serve(Learner(_params()))
    for _ in range(2):
        _check(client.params())


# Memory is given back, and used again when nobody looks at it


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


def _inodes() -> set[int]:
    return {os.fstat(memory.descriptor).st_ino for memory in frozen._idle}


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_memory_is_used_again_when_its_last_reader_has_gone(
    serve: Serve, script: Script, ends: str
) -> None:
    learner = Learner(np.full(_SIZE, 7))
    server, client = serve(learner)
    holder = script(_HOLDER, server.address)
    assert holder.line() == "7"
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
    frozen.tidy(0.0)  # what waits to be used again
    return maps() <= before[0] and descriptors() <= before[1]


def test_what_readers_hold_stays_valid_without_the_server_and_its_memory_goes_with_the_last(
    serve: Serve,
) -> None:
    before = maps(), descriptors()
    learner = Learner([np.arange(_SIZE), np.ones(10)])
    server, client = serve(learner)
    client.params()
    assert descriptors() > before[1]
    value = client.params()
    learner.shared = None
    courier.close(client)
    server.stop(0.0)
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
