import asyncio
import concurrent.futures
import pickle
import sys
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import courier
from courier.calls.outcomes import Failure
from tests.courier.conftest import Script, Serve


class OddError(Exception):
    """Cannot be rebuilt from its args alone, and not all of it can travel."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
        self.lock = threading.Lock()


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError


_ERRORS: dict[str, Callable[[], BaseException]] = {
    "key": lambda: KeyError("gone"),
    "odd": lambda: OddError(7, reason="odd"),
    "mute": MuteError,
    "surrogate": lambda: ValueError("lone \udc80 surrogate"),
    "unicode": lambda: UnicodeDecodeError("ascii", b"\xff", 0, 1, "ordinal not in range"),
    "large": lambda: ValueError(np.arange(2_000_000)),
    "wordy": lambda: ValueError("x" * 10_000_000),
    "stop": lambda: StopIteration("no more"),
    "cancelled": lambda: concurrent.futures.CancelledError("not yours"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
}


class Failing:
    def fail(self, name: str) -> None:
        error = _ERRORS[name]()
        raise error

    def chained(self) -> None:
        try:
            self.fail("key")
        except KeyError as error:
            raise OSError(2, "no such thing") from error

    def fine(self) -> str:
        return "fine"


@pytest.fixture
def client(serve: Serve, mode: str) -> Any:
    return serve(Failing(), in_process=mode)[1]


def test_an_exception_arrives_with_its_type_message_and_traceback(client: Any) -> None:
    with pytest.raises(KeyError) as caught:
        client.fail("key")
    assert caught.value.args == ("gone",)
    text = courier.remote_traceback(caught.value)
    assert text is not None
    assert "raise error" in text
    assert text.rstrip().endswith("KeyError: 'gone'")
    assert "_dispatch" not in text
    assert courier.remote_traceback(ValueError()) is None  # of this process


def test_an_exception_keeps_its_type_and_attributes_but_those_that_cannot_travel(
    client: Any,
) -> None:
    with pytest.raises(OddError, match="7: odd") as caught:
        client.fail("odd")
    assert (caught.value.code, caught.value.reason) == (7, "odd")
    assert not hasattr(caught.value, "lock")


def test_built_in_exceptions_with_state_are_rebuilt(client: Any) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        client.chained()
    assert caught.value.errno == 2
    text = courier.remote_traceback(caught.value) or ""
    assert "KeyError" in text
    assert "direct cause" in text
    with pytest.raises(UnicodeDecodeError, match="ordinal not in range"):
        client.fail("unicode")


def test_exceptions_that_cannot_be_shown_still_arrive(client: Any) -> None:
    error = client.futures.fail("mute").exception(20)
    assert type(error) is MuteError
    with pytest.raises(ValueError, match="surrogate"):
        client.fail("surrogate")


def test_the_arrays_of_an_exception_stay_outside_of_its_pickle() -> None:
    array = np.arange(1 << 20)
    parcel = Failure.of(ValueError(array)).parcel
    assert len(parcel.pickle) < 1 << 14
    assert np.shares_memory(np.frombuffer(parcel.buffers[0], array.dtype), array)
    assert (Failure.read(parcel).report.rebuild().args[0] == array).all()


def test_a_large_exception_keeps_its_type_and_content(client: Any) -> None:
    error = client.futures.fail("large").exception(20)
    assert isinstance(error, ValueError)
    assert error.args[0].shape == (2_000_000,)
    with pytest.raises(ValueError, match="xxx") as wordy:
        client.fail("wordy")
    assert len(wordy.value.args[0]) == 10_000_000


def test_a_type_that_only_the_server_can_import_becomes_a_remote_error(
    script: Script, tmp_path: Any, connect: Any
) -> None:
    (tmp_path / "only_there.py").write_text("class StrangeError(Exception): pass\n")
    process = script(
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import only_there\n"
        "def fail(): raise only_there.StrangeError('how strange')\n"
        "with courier.Server(fail, secret=secret) as server:\n"
        "    print(server.address, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    client = connect(process.line())
    with pytest.raises(courier.RemoteError, match="how strange") as caught:
        client()
    assert caught.value.type_name == "only_there.StrangeError"
    assert "StrangeError: how strange" in (courier.remote_traceback(caught.value) or "")


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_an_exit_in_a_handler_ends_neither_side(client: Any, name: str) -> None:
    with pytest.raises(courier.RemoteError, match=name):
        client.fail(name)
    assert name in repr(client.futures.fail(name).exception(20))
    assert client.fine() == "fine"


def test_stop_iteration_arrives_in_every_way_of_calling(client: Any) -> None:
    with pytest.raises(StopIteration, match="no more"):
        client.fail("stop")
    assert isinstance(client.futures.fail("stop").exception(20), StopIteration)

    # A coroutine cannot raise StopIteration.
    with pytest.raises(courier.RemoteError, match="StopIteration: no more") as caught:
        asyncio.run(client.aio.fail("stop"))
    assert "in fail" in (courier.remote_traceback(caught.value) or "")


def test_a_cancelled_error_of_the_method_is_not_taken_for_a_cancelled_call(client: Any) -> None:
    future = client.futures.fail("cancelled")
    with pytest.raises(concurrent.futures.CancelledError, match="not yours") as caught:
        future.result(20)
    assert "in fail" in (courier.remote_traceback(caught.value) or "")
    assert not future.cancelled()
    with pytest.raises(courier.RemoteError, match="not yours"):
        asyncio.run(client.aio.fail("cancelled"))


_LONG = "abc\n" * (1 << 22)


def _noted(notes: list[str]) -> Exception:
    error = ValueError("short")
    error.__notes__ = notes  # type: ignore[attr-defined]
    return error


def _chained(name: str, error: Exception) -> Exception:
    chained = ValueError("short")
    setattr(chained, name, error)
    return chained


@pytest.mark.parametrize(
    "error",
    [
        ValueError(_LONG),
        ValueError(_LONG.replace("\n", " ")),
        SyntaxError("short", ("script.py", 1, 1, _LONG)),
        _chained("__cause__", ValueError(_LONG)),
        _chained("__context__", _chained("__cause__", ValueError(_LONG))),
        pytest.param(_noted([_LONG]), id="note"),
        pytest.param(_noted(["short"] * (1 << 15)), id="many notes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_long_text_of_an_exception_is_cut_before_it_is_copied(error: Exception) -> None:
    if hasattr(error, "__notes__") and sys.version_info < (3, 11):
        pytest.skip("notes are printed from Python 3.11 on")
    tracemalloc.start()
    try:
        report = courier.ExceptionReport.text_of(error)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert len(report.message) + len(report.traceback) < 1 << 18
    assert pickle.loads(pickle.dumps(report)) == report  # it is not cut once more
    assert "characters are left out]" in report.traceback


def test_a_chain_without_end_shows_how_it_begins_and_ends() -> None:
    error: Exception = KeyError("the first")
    for _ in range(2000):
        error = _chained("__cause__", error)
    error.args = ("the last",)
    report = courier.ExceptionReport.of(error)
    assert report.traceback.startswith("KeyError: 'the first'\n")
    assert report.traceback.endswith("ValueError: the last\n")
    assert "characters are left out]" in report.traceback
    assert len(report.traceback) < 1 << 17
    assert len(report.causes) <= 100


def test_no_sender_is_trusted_with_the_length_of_a_text() -> None:
    report = courier.ExceptionReport.of(KeyError("gone"))
    object.__setattr__(report, "message", "x" * (1 << 20))
    object.__setattr__(report, "traceback", _LONG)
    twin = pickle.loads(pickle.dumps(report))
    assert len(twin.message) + len(twin.traceback) < 1 << 18


def test_an_exception_leaves_out_what_is_too_large_of_it() -> None:
    def packed(error: Exception) -> BaseException:
        report = courier.ExceptionReport.text_of(error).with_object(error, 90_000)
        return report.rebuild()

    odd = OddError(7, reason="odd")
    odd.data = "x" * 100_000  # type: ignore[attr-defined]
    rebuilt = packed(odd)
    assert isinstance(rebuilt, OddError)
    assert (rebuilt.code, hasattr(rebuilt, "data")) == (7, False)
    assert packed(ValueError(np.zeros(10_000))).args[0].shape == (10_000,)
    arrays = packed(ValueError(np.zeros(1_000_000)))
    assert isinstance(arrays, ValueError)
    assert "0." in str(arrays)
    assert isinstance(packed(ValueError("x" * 100_000)), courier.RemoteError)


def test_what_ends_a_process_comes_back_as_itself_only_where_that_is_asked_for() -> None:
    report = courier.ExceptionReport.of(SystemExit(3))
    assert isinstance(report.rebuild(), courier.RemoteError)
    rebuilt = report.rebuild(kind=BaseException)
    assert isinstance(rebuilt, SystemExit)
    assert rebuilt.code == 3
