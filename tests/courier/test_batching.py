"""Functions that answer many calls at once."""

import collections
import concurrent.futures
import contextvars
import copy
import datetime as dt
import functools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import courier
from courier import lowlevel
from tests.courier.by_hand import Stranger
from tests.courier.conftest import Script, Serve, our_threads
from tests.courier.waiting import wait_until

Future = concurrent.futures.Future
_PATIENCE_S = 20.0


#: Threads of batches leave soon.
_HASTY = courier.Timing(batch_idle_s=0.05)
_variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Step(NamedTuple):
    observation: Any
    reward: Any


class Table:
    """Has a shape as a table of pandas has one, and its items are the names of its columns."""

    shape = (2, 2)

    def __getitem__(self, name: str) -> Any:
        return name

    def __iter__(self) -> Iterator[str]:
        return iter(("a", "b"))


class BrokenArray:
    """Has all attributes of an array, and none that works."""

    def __array__(self) -> Any:
        raise AssertionError("nobody needs it")

    @property
    def dtype(self) -> Any:
        return np.dtype(float)

    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape")


class Seen:
    """A function to be batched that remembers what it was called with."""

    def __init__(self, answer: Callable[..., Any] | None = None) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._answer = answer or (lambda *args, **_: args[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self._answer(*args, **kwargs)

    @property
    def sizes(self) -> list[int]:
        return [len(args[0]) for args, _ in self.calls]


def _handler(function: Any, batch_size: int, **options: Any) -> Any:
    options = {"timeout": None, "timing": _HASTY, **options}
    return courier.batched_handler(batch_size, **options)(function)


def _submit_all(handler: Any, *values: Any) -> list[Any]:
    futures = [handler.submit(value) for value in values]
    return [future.result(_PATIENCE_S) for future in futures]


def _echo(values: Any) -> Any:
    return values


# What the function gets


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], np.int64),
        ([1, 0.5], np.float64),
        ([True, False], np.bool_),
        ([np.full((), 1, np.float32)] * 2, np.float32),
        ([np.full(3, index, np.uint8) for index in range(4)], np.uint8),
        ([np.zeros((2, 0), np.bool_)] * 2, np.bool_),
        ([np.full((2, 3, 4), index, np.complex64) for index in range(4)], np.complex64),
    ],
)
def test_numbers_and_arrays_are_stacked(values: list[Any], dtype: Any) -> None:
    seen = Seen()
    results = _submit_all(_handler(seen, len(values)), *values)
    (batch,) = seen.calls[0][0]
    assert (type(batch), batch.dtype) == (np.ndarray, dtype)
    assert batch.shape == (len(values), *np.shape(values[0]))
    for result, value in zip(results, values, strict=True):
        np.testing.assert_array_equal(result, value)


def test_tuples_named_tuples_and_dicts_in_any_order_are_merged_inside() -> None:
    seen = Seen()
    first = {"step": Step(np.full(2, 0), 0.0), "pair": (0, "text"), "none": None}
    second = collections.OrderedDict(none=None, pair=(1, "text"), step=Step(np.full(2, 1), 1.0))
    results = _submit_all(_handler(seen, 2), first, second)
    (batch,) = seen.calls[0][0]
    assert type(batch["step"]) is Step
    assert batch["step"].observation.shape == (2, 2)
    assert batch["step"].reward.tolist() == [0.0, 1.0]
    assert batch["pair"][0].tolist() == [0, 1]
    assert batch["pair"][1] == ["text", "text"]
    assert batch["none"] == [None, None]
    for result, value in zip(results, (first, second), strict=True):
        assert type(result["step"]) is Step
        np.testing.assert_array_equal(result["step"].observation, value["step"].observation)
        assert result["pair"] == value["pair"]
        assert result["none"] is None


@pytest.mark.parametrize(
    "values", [["a", "bc"], [b"a", b"bc"], [None, None], [[1], [2, 3]], [{1}, {2}], [None, "a"]]
)
def test_everything_else_becomes_a_list(values: list[Any]) -> None:
    seen = Seen()
    assert _submit_all(_handler(seen, 2), *values) == values
    assert seen.calls == [((values,), {})]


def test_keyword_arguments_are_merged_by_name() -> None:
    seen = Seen(lambda left, *, right: left - right)
    handler = _handler(seen, 2)
    futures = [handler.submit(5, right=1), handler.submit(right=2, left=10)]
    futures += [handler.submit(7, right=3), handler.submit(left=20, right=4)]
    assert [future.result(_PATIENCE_S) for future in futures] == [4, 8, 4, 16]
    assert len(seen.calls) == 2


# What it returns


@pytest.mark.parametrize(
    ("give", "expected"),
    [
        (lambda x: [int(v) * 2 for v in x], [2, 4]),
        (lambda x: x * 2, [2, 4]),
        (lambda x: (x, ["a", "b"]), [(1, "a"), (2, "b")]),
        (lambda x: {"x": x, "s": (x, x)}, [{"x": 1, "s": (1, 1)}, {"x": 2, "s": (2, 2)}]),
        (lambda x: Step(x, x * 2), [Step(1, 2), Step(2, 4)]),
        (lambda _: [None, (1, 2)], [None, (1, 2)]),
        (lambda _: (), [(), ()]),
    ],
)
def test_a_result_is_divided_among_the_callers(give: Any, expected: Any) -> None:
    results = _submit_all(_handler(give, 2), 1, 2)
    assert results == expected
    assert list(map(type, results)) in (list(map(type, expected)), [np.int64] * 2)


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda _: [1], "one item per call: 2, but there are 1"),
        (lambda _: np.zeros((3, 2)), "one item per call: 2, but there are 3"),
        (lambda x: (x, [1, 2, 3]), "one item per call: 2, but there are 3"),
        (lambda x: {"x": x, "y": []}, "one item per call: 2, but there are 0"),
        (lambda x: x.sum(), "single number"),
        (lambda _: None, "not NoneType"),
        (lambda _: 3, "not int"),
        (lambda _: "ab", "not str"),
        (lambda _: iter([1, 2]), "not list_iterator"),
        (lambda _: {1, 2}, "not set"),
        (lambda _: Table(), "not Table"),
    ],
)
def test_a_wrong_result_is_a_clear_error_for_every_caller(give: Any, words: str) -> None:
    handler = _handler(give, 2)
    for _ in range(2):  # it continues after that
        futures = [handler.submit(1), handler.submit(2)]
        for future in futures:
            with pytest.raises((TypeError, ValueError), match=words):
                future.result(_PATIENCE_S)


@pytest.mark.parametrize("error", [KeyError("all"), SystemExit(1), KeyboardInterrupt()])
def test_what_it_raises_reaches_every_caller(error: BaseException) -> None:
    def fail(_: Any) -> Any:
        raise error

    handler = _handler(fail, 3)
    for _ in range(2):
        for future in [handler.submit(index) for index in range(3)]:
            assert future.exception(_PATIENCE_S) is error


# When a batch is complete


@pytest.mark.parametrize("timeout", [0, 0.0, 0.01, dt.timedelta(milliseconds=10)])
def test_a_batch_that_is_not_full_runs_when_its_time_is_over(timeout: Any) -> None:
    handler = _handler(_echo, 1000, timeout=timeout)
    assert [handler(index) for index in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("timeout", [None, dt.timedelta(days=30), float("inf"), 1e300])
def test_a_batch_runs_when_it_is_full_and_may_wait_very_long_for_that(timeout: Any) -> None:
    seen = Seen()
    handler = _handler(seen, 2, timeout=timeout)
    first = handler.submit(1)
    with pytest.raises(concurrent.futures.TimeoutError):
        first.result(0.05)
    assert handler(2) == 2
    assert first.result(_PATIENCE_S) == 1
    assert _submit_all(handler, 1, 2, 3, 4) == [1, 2, 3, 4]
    assert seen.sizes == [2, 2, 2]


def test_a_padded_batch_always_has_its_full_size() -> None:
    seen = Seen()
    handler = _handler(seen, 4, timeout=0, pad_batch=True)
    assert handler(7) == 7
    assert handler(("a", np.ones(2)))[0] == "a"
    assert seen.calls[0][0][0].tolist() == [7] * 4
    assert seen.calls[1][0][0][0] == ["a"] * 4
    assert seen.calls[1][0][0][1].shape == (4, 2)
    with pytest.raises(ValueError, match="one item per call: 4, but there are 1"):
        _handler(lambda _: [1], 4, timeout=0, pad_batch=True)(7)


class Waiting(Seen):
    """Answers when a test says so."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.release = threading.Event()

    def _wait(self, values: Any) -> Any:
        assert self.release.wait(_PATIENCE_S)
        return values


@pytest.mark.parametrize("parallel", [1, 3])
def test_so_many_batches_run_at_the_same_time(parallel: int) -> None:
    waiting = Waiting()
    handler = _handler(waiting, 2, max_parallelism=parallel)
    futures = [handler.submit(index) for index in range(10)]
    wait_until(lambda: len(waiting.calls) == parallel)
    assert not any(future.done() for future in futures)
    waiting.release.set()
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(10))
    assert waiting.sizes == [2] * 5


def test_the_next_batch_fills_while_one_runs() -> None:
    waiting = Waiting()
    handler = _handler(waiting, 8, timeout=0)
    first = handler.submit(0)
    wait_until(lambda: waiting.calls)
    others = [handler.submit(index) for index in range(8)]
    waiting.release.set()
    assert first.result(_PATIENCE_S) == 0
    assert [future.result(_PATIENCE_S) for future in others] == list(range(8))
    assert waiting.sizes == [1, 8]


# Calls that do not fit together


def test_calls_of_other_shapes_fill_batches_of_their_own_and_hold_nobody_up() -> None:
    seen = Seen()
    handler = _handler(seen, 2)
    odd = handler.submit(np.zeros(7))
    values = [np.zeros(2), np.ones(3), "text", np.ones(3), np.ones(2), "other"]
    for result, value in zip(_submit_all(handler, *values), values, strict=True):
        np.testing.assert_array_equal(result, value)
    assert not odd.done()
    assert handler(np.ones(7)).tolist() == [1.0] * 7
    assert odd.result(_PATIENCE_S).tolist() == [0.0] * 7
    assert seen.sizes == [2, 2, 2, 2]


@pytest.mark.parametrize("odd", [np.zeros(2, np.float32), (1, 2), {"a": 1}, Step(1, 2)])
def test_calls_with_other_types_do_not_meet(odd: Any) -> None:
    seen = Seen()
    handler = _handler(seen, 4, timeout=0.05)
    futures = [handler.submit(value) for value in (np.zeros(2), odd, "text")]
    assert [type(future.result(_PATIENCE_S)) for future in futures] == [np.ndarray, type(odd), str]
    assert len(seen.calls) == 3


def test_arguments_that_cannot_be_merged_hit_only_who_gives_them() -> None:
    handler = _handler(lambda values: values, 2, timeout=0.05)
    good, bad = handler.submit(1), handler.submit(1, 2)
    assert good.result(_PATIENCE_S) == 1
    with pytest.raises(TypeError, match="positional argument"):
        bad.result(_PATIENCE_S)
    with pytest.raises(RuntimeError, match="no shape"):
        handler(BrokenArray())
    assert handler(1) == 1


# Callers in the same process


def test_callbacks_may_call_again_and_a_caller_that_fails_or_cancels_hits_nobody_else() -> None:
    handler = _handler(_echo, 2)

    def leave(_: Any) -> None:
        raise SystemExit

    handler.submit(1).add_done_callback(leave)
    assert handler(2) == 2
    assert handler.submit(3).cancel()
    assert handler(4) == 4
    assert _submit_all(handler, 5, 6) == [5, 6]
    again: list[Future[Any]] = []
    handler.submit(7).add_done_callback(lambda _: again.append(handler.submit(8)))
    assert handler(9) == 9
    wait_until(lambda: again)
    assert handler(10) == 10
    assert again[0].result(_PATIENCE_S) == 8


def test_it_leaves_no_thread_when_nobody_calls() -> None:
    assert _handler(_echo, 1)(1) == 1
    wait_until(lambda: not any(t.name.startswith("courier-batch") for t in our_threads()))
    assert _handler(_echo, 1)(1) == 1


def test_it_sees_the_context_variables_of_who_made_it() -> None:
    token = _variable.set("of the maker")
    handler = _handler(lambda values: [_variable.get()] * len(values), 1)
    _variable.reset(token)
    assert handler(1) == "of the maker"


def test_it_works_in_a_forked_child() -> None:
    handler = _handler(_echo, 2)
    open_call = handler.submit(1)
    child = os.fork()
    if child == 0:
        works = _submit_all(handler, 5, 6) == [5, 6]
        os._exit(0 if works else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handler(2) == 2
    assert open_call.result(_PATIENCE_S) == 1


# Served


class Node:
    """Serves a batched method in each of the ways in which an object can have one."""

    def __init__(self, function: Any = _echo, batch_size: int = 4, **options: Any) -> None:
        self.act = _handler(function, batch_size, **options)
        self._hidden = self.act

    @property
    def act_too(self) -> Any:
        return self.act

    @courier.batched_handler(batch_size=2, timeout_s=None, timing=_HASTY)
    def method(self, values: Any) -> Any:
        return [(id(self), value) for value in values]

    def echo(self, value: Any) -> Any:
        return value

    @property
    def waiting(self) -> int:
        return sum(map(len, self.act._waiting.values()))


@pytest.fixture(params=["wire", "copy"])
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of servers: calls go by the wire, or within the process."""
    return {"in_process": request.param, "thread_pool_size": 1}


def test_it_is_served_as_attribute_property_and_method_and_bound_alone(
    serve: Serve, way: dict[str, Any]
) -> None:
    server, client = serve(Node(), **way)
    server.bind("also", _handler(_echo, 2))
    assert {"act", "act_too", "method", "also"} <= set(server.methods())
    futures = [client.futures.act(1), client.futures.act_too(2), client.futures.act(3)]
    assert client.act_too(4) == 4
    assert [future.result(_PATIENCE_S) for future in futures] == [1, 2, 3]
    _, alone = serve(_handler(_echo, 2), **way)
    for call in (client.futures.also, alone.futures):
        futures = [call(index) for index in range(2)]
        assert [future.result(_PATIENCE_S) for future in futures] == [0, 1]


def test_a_decorated_method_has_batches_for_each_object() -> None:
    one, other = Node(), Node()
    first = one.method.submit(1)
    alone = other.method.submit(2)
    assert one.method(3) == (id(one), 3)
    assert first.result(_PATIENCE_S) == (id(one), 1)
    assert not alone.done()
    assert other.method(4) == (id(other), 4)
    assert one.method is one.method
    assert one.method.__name__ == "method"


def test_callers_may_be_more_than_threads(serve: Serve, way: dict[str, Any]) -> None:
    seen = Seen()
    _, client = serve(Node(seen, 40), **way)
    futures = [client.futures.act(np.full(1 << 14, index)) for index in range(39)]
    assert client.echo("meanwhile") == "meanwhile"
    assert client.act(np.full(1 << 14, 39))[-1] == 39
    assert [future.result(_PATIENCE_S)[0] for future in futures] == list(range(39))
    assert seen.sizes == [40]


def test_a_caller_that_leaves_is_dropped_from_the_batch_that_fills(
    serve: Serve, way: dict[str, Any]
) -> None:
    seen = Seen()
    node = Node(seen, 3)
    _, client = serve(node, **way)
    gone = [client.futures.act(-1) for _ in range(2)]
    wait_until(lambda: node.waiting == 2)
    for future in gone:
        future.cancel()
    wait_until(lambda: node.waiting == 0)
    with pytest.raises(courier.CallTimeoutError):
        courier.with_timeout(client, 0.2).act(-1)
    wait_until(lambda: node.waiting == 0)
    futures = [client.futures.act(index) for index in range(3)]
    assert [future.result(_PATIENCE_S) for future in futures] == [0, 1, 2]
    assert [sorted(args[0].tolist()) for args, _ in seen.calls] == [[0, 1, 2]]


def test_a_handler_and_another_batch_may_call_it(serve: Serve) -> None:
    inner = _handler(_echo, 2)
    outer = _handler(lambda values: [inner(int(value)) for value in values], 2, max_parallelism=2)
    server, client = serve(outer)
    server.bind("outer", lambda value: inner(value) + 1)
    futures = [client.futures(index) for index in range(4)]
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(4))
    futures = [client.futures.outer(index) for index in range(6)]
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(1, 7))


def test_what_answers_calls_may_call_clients_that_drain(serve: Serve) -> None:
    _, far = serve(Node())
    node = Node(lambda values: [far.echo(int(value)) for value in values], 2)
    _, client = serve(node)
    lowlevel.stop_calling(far)
    futures = [client.futures.act(index) for index in range(2)]
    assert [future.result(_PATIENCE_S) for future in futures] == [0, 1]
    with pytest.raises(courier.CallCancelledError):
        _submit_all(node.act, 1, 2)


# The decorator


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 1, "max_parallelism": 0}, ValueError),
        ({"batch_size": 1, "timeout": -1}, ValueError),
        ({"batch_size": 1, "timeout": float("nan")}, ValueError),
        ({"batch_size": 1, "timeout": dt.timedelta(seconds=-1)}, ValueError),
        ({"batch_size": 2.5}, TypeError),
        ({"batch_size": 1, "max_parallelism": 1.5}, TypeError),
        ({"batch_size": 1, "timeout": "1"}, TypeError),
        ({"batch_size": _echo}, TypeError),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        courier.batched_handler(**arguments)


def test_it_takes_only_functions_that_return() -> None:
    async def act(values: Any) -> Any:
        return values

    def give(values: Any) -> Iterator[Any]:
        yield from values

    for function in (act, give):
        with pytest.raises(TypeError, match="is async or yields"):
            courier.batched_handler(2)(function)
    with pytest.raises(TypeError, match="takes a function"):
        courier.batched_handler(2)(3)  # type: ignore[arg-type]


def test_it_cannot_be_pickled_or_copied() -> None:
    handler = _handler(_echo, 2)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="make it in the constructor"):
            attempt(handler)


def test_it_looks_like_its_function() -> None:
    def act(values: Any) -> Any:
        """Acts."""
        return values

    assert _handler(act, 1).__name__ == "act"
    assert _handler(act, 1).__doc__ == "Acts."
    assert _handler(functools.partial(act), 1)(3) == 3


def test_it_needs_no_numpy(script: Script) -> None:
    # As where it is not installed.
    source = """
import sys
assert "numpy" not in sys.modules
sys.modules["numpy"] = None
handler = courier.batched_handler(batch_size=2, timeout=None)(lambda values: values)
futures = [handler.submit((1, "a")), handler.submit((2.5, "b"))]
print([future.result(20) for future in futures])
"""
    assert script(source).output() == "[(1, 'a'), (2.5, 'b')]"


def test_the_mark_of_an_idempotent_function_stays(serve: Serve, secret: courier.Secret) -> None:
    server, _ = serve()
    server.bind("marked", _handler(courier.idempotent(lambda values: values), 1))
    server.bind("unmarked", _handler(_echo, 1))
    with Stranger(server.address, secret) as client:
        assert client.introduction.idempotent == ("marked",)
