"""Frames arrive as they were sent, however the stream is cut."""

import os
import threading
from typing import Any

from hypothesis import given, strategies as st

from launchers.host.link import FrameDecoder, LinkFrame, SendBuffer, read_some, write_all

_TEXTS = st.text(max_size=8)
_VALUES = st.one_of(_TEXTS, st.integers(), st.booleans(), st.none(), st.lists(_TEXTS, max_size=3))
_NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name != "op")
_FRAMES = st.builds(
    LinkFrame, _TEXTS, st.dictionaries(_NAMES, _VALUES, max_size=3), st.binary(max_size=64)
)


@given(st.lists(_FRAMES, max_size=5), st.data())
def test_frames_survive_any_cut(frames: list[LinkFrame], data: Any) -> None:
    stream = b"".join(frame.encode() for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = FrameDecoder()
    found: list[LinkFrame] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += decoder.feed(stream[start:end])
    assert found == frames


def test_an_outbox_never_blocks_and_loses_nothing() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    outbox = SendBuffer(write_end)
    sent = [LinkFrame("output", {"n": n}, bytes(50_000)) for n in range(20)]
    for frame in sent:
        outbox.put(frame)
    assert len(outbox)
    found: list[LinkFrame] = []
    decoder = FrameDecoder()

    def read() -> None:
        while data := read_some(read_end):
            found.extend(decoder.feed(data))

    reader = threading.Thread(target=read)
    reader.start()
    while len(outbox):
        outbox.flush()
    os.close(write_end)
    reader.join()
    os.close(read_end)
    assert found == sent


def test_writing_where_nobody_reads_is_told_not_raised() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    assert not write_all(write_end, b"text")
    outbox = SendBuffer(write_end)
    outbox.put(LinkFrame("text"))
    assert outbox.broken
    assert not len(outbox)
    os.close(write_end)
