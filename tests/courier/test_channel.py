import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from courier._engine.carrier import UnixCarrier
from courier._engine.channel import Channel, NothingSentError
from courier._engine.frames import Frame, Kind
from courier._frozen import AVAILABLE
from courier._parcel import Parcel
from courier._shared import MIN_BYTES
from courier._timing import DEFAULT, Timing

_KEY = bytes(32)


def _pair(timing: Timing = DEFAULT) -> tuple[Channel, Channel]:
    ours, theirs = (
        Channel(UnixCarrier(end, "the test"), receive_key=_KEY, send_key=_KEY, timing=timing)
        for end in socket.socketpair()
    )
    return ours, theirs


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Two ends of a connection."""
    ends = _pair()
    yield ends
    for end in ends:
        if not end.is_closed:
            end.close()


def _all_of(channel: Channel) -> list[Frame]:
    frames: list[Frame] = []
    try:
        while (some := channel.receive(wait=False)) is not None:
            frames += some
    except BlockingIOError:
        pass
    return frames


def test_a_frame_that_is_posted_while_another_leaves_is_not_left_behind(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    send_directly = ours._send_directly

    def send_and_be_overtaken(chunk: bytes) -> object:
        result: object = send_directly(chunk)  # type: ignore[func-returns-value]
        # It finds that somebody sends, and leaves its frame to them.
        other = threading.Thread(target=ours.send, args=(Kind.VALUE, 2, Parcel(b"2"), b""))
        other.start()
        other.join()
        return result

    monkeypatch.setattr(ours, "_send_directly", send_and_be_overtaken)
    assert ours.send(Kind.VALUE, 1, Parcel(b"1"), b"")
    assert [frame.call for frame in _all_of(theirs)] == [1, 2]


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["small", "large"])
def test_nothing_is_sent_over_a_closed_connection_and_that_is_said(
    pair: tuple[Channel, Channel], size: int
) -> None:
    ours, _ = pair
    ours.close()
    with pytest.raises(NothingSentError):
        ours.send(Kind.VALUE, 1, Parcel(bytes(size)), b"")


@pytest.mark.skipif(not AVAILABLE, reason="needs memfd_create")
def test_memory_that_nobody_used_for_long_is_given_back() -> None:
    ours, theirs = _pair(Timing(segment_idle_s=0.0))
    large = Parcel(b"", [memoryview(bytes(MIN_BYTES))])
    before = Path("/proc/self/maps").read_text().count("memfd:courier")

    def held() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:courier") - before

    with contextlib.closing(ours), contextlib.closing(theirs):
        assert ours.send(Kind.VALUE, 1, large, b"")
        received = _all_of(theirs)
        ours.tidy()  # not what is in use
        theirs.tidy()
        assert held() == 2
        received.clear()
        ours.tidy()
        theirs.tidy()
        assert held() == 0
