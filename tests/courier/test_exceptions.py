import asyncio
import concurrent.futures
import pickle
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

import courier
from tests.courier.conftest import Script, Serve


class OddError(Exception):
    """Cannot be rebuilt from its args alone, and not all of it can travel."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
        self.lock = threading.Lock()


class Failing:
    def key(self) -> None:
        raise KeyError("gone")

    def odd(self) -> None:
        raise OddError(7, reason="odd")

    def unprintable(self) -> None:
        class MuteError(Exception):
            def __str__(self) -> str:
                raise ValueError

        raise MuteError

    def surrogate(self) -> None:
        raise ValueError("lone \udc80 surrogate")

    def chained(self) -> None:
        try:
            self.key()
        except KeyError as error:
            raise OSError(2, "no such thing") from error

    def unicode(self) -> None:
        b"\xff".decode("ascii")

    def large(self) -> None:
        raise ValueError(np.arange(2_000_000))

    def wordy(self) -> None:
        raise ValueError("x" * 10_000_000)

    def stop_iteration(self) -> None:
        raise StopIteration("no more")

    def cancelled(self) -> None:
        raise concurrent.futures.CancelledError("not yours")

    def leave(self) -> None:
        raise SystemExit(3)

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def leave_generator(self) -> None:
        raise GeneratorExit

    def fine(self) -> str:
        return "fine"


@pytest.fixture
def client(serve: Serve, mode: str) -> Any:
    return serve(Failing(), in_process=mode)[1]


def test_an_exception_arrives_with_its_type_message_and_traceback(client: Any) -> None:
    with pytest.raises(KeyError) as caught:
        client.key()
    assert caught.value.args == ("gone",)
    text = courier.remote_traceback(caught.value)
    assert text is not None
    assert 'raise KeyError("gone")' in text
    assert text.rstrip().endswith("KeyError: 'gone'")
    assert "_dispatch" not in text
    assert courier.remote_traceback(ValueError()) is None  # of this process


def test_an_exception_keeps_its_type_and_attributes_but_those_that_cannot_travel(
    client: Any,
) -> None:
    with pytest.raises(OddError, match="7: odd") as caught:
        client.odd()
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
        client.unicode()


def test_exceptions_that_cannot_be_shown_still_arrive(client: Any) -> None:
    error = client.futures.unprintable().exception(20)
    assert type(error).__name__ == "MuteError"
    with pytest.raises(ValueError, match="surrogate"):
        client.surrogate()


def test_a_large_exception_keeps_its_type_and_content(client: Any) -> None:
    error = client.futures.large().exception(20)
    assert isinstance(error, ValueError)
    assert error.args[0].shape == (2_000_000,)
    with pytest.raises(ValueError, match="xxx") as wordy:
        client.wordy()
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


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("leave", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("leave_generator", "GeneratorExit"),
    ],
)
def test_an_exit_in_a_handler_ends_neither_side(client: Any, method: str, name: str) -> None:
    with pytest.raises(courier.RemoteError, match=name):
        getattr(client, method)()
    assert name in repr(getattr(client.futures, method)().exception(20))
    assert client.fine() == "fine"


def test_stop_iteration_arrives_in_every_way_of_calling(client: Any) -> None:
    with pytest.raises(StopIteration, match="no more"):
        client.stop_iteration()
    assert isinstance(client.futures.stop_iteration().exception(20), StopIteration)

    async def call() -> None:
        # A coroutine cannot raise StopIteration.
        with pytest.raises(courier.RemoteError, match="StopIteration: no more") as caught:
            await client.aio.stop_iteration()
        assert "in stop_iteration" in (courier.remote_traceback(caught.value) or "")

    asyncio.run(call())


def test_a_cancelled_error_of_the_method_is_not_taken_for_a_cancelled_call(client: Any) -> None:
    future = client.futures.cancelled()
    with pytest.raises(concurrent.futures.CancelledError, match="not yours") as caught:
        future.result(20)
    assert "in cancelled" in (courier.remote_traceback(caught.value) or "")
    assert not future.cancelled()

    async def call() -> None:
        with pytest.raises(courier.RemoteError, match="not yours"):
            await client.aio.cancelled()

    asyncio.run(call())


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
