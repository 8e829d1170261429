"""What a supervisor's log says to those who follow it: written, cut, repeated, lost and forged."""

import dataclasses
import json
import os
from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from courier import ExceptionReport, RemoteError
from launchers.hosts.elsewhere import ProgramEnd
from launchers.kubernetes._records import (
    Note,
    PrintedRecord,
    Record,
    RecordReader,
    RecordWriter,
    StatusRecord,
    Up,
)
from launchpad_lite.launching import NodeFailure, NodeStatus, Outcome, ProgramResult
from launchpad_lite.life.result import Restart

KEY = b"k" * 32
NODES = ("actor[0]", "actor[11]", "two words[3]", "schüler[0]")


class Log:
    """A writer, and what it wrote."""

    def __init__(self) -> None:
        descriptor = os.memfd_create("log")
        self._file = os.fdopen(descriptor, "rb")
        self.writer = RecordWriter(descriptor, KEY)

    def data(self) -> bytes:
        self.writer.drain(20.0)
        self._file.seek(0)
        return self._file.read()

    def lines(self) -> list[str]:
        text = self.data().decode(errors="surrogateescape")
        assert text == "" or text.endswith("\n")
        return text.split("\n")[:-1]

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def read(
    lines: Iterable[str],
    reader: RecordReader | None = None,
    *,
    stamp: str = "2026-01-02T03:04:05Z ",
) -> list[Record]:
    reader = reader or RecordReader(KEY)
    return [record for line in lines for record in reader.feed(stamp + line)]


def output_of(records: Iterable[Record], node: str) -> bytes:
    return b"".join(
        each.data for each in records if isinstance(each, PrintedRecord) and each.node == node
    )


def read_end(lines: Iterable[str], key: bytes | None = KEY) -> ProgramEnd:
    """Returns the only record."""
    (found,) = read(lines, RecordReader(key))
    assert isinstance(found, ProgramEnd)
    return found


def report_of(end: ProgramEnd) -> ExceptionReport:
    """Returns how the first failure was reported."""
    report = end.result.failures[0].report
    assert report is not None
    return report


def failure(error: Exception) -> NodeFailure:
    return NodeFailure.of_exception("actor[0]", "demo-actor-0", ExceptionReport.of(error))


def an_end(*failures: NodeFailure) -> ProgramEnd:
    first = dataclasses.replace(
        failure(ValueError("no such level", 7)),
        is_consequence=True,
        stacks="File x",
        attempt=2,
        at_s=1.5,
        restarts=(Restart("actor[0]", 1, 0.5, 0.1, failure(KeyError("a"))),),
    )
    lost = NodeFailure("actor[1]", "demo-actor-1", "its host is lost", host_lost=True)
    exited = NodeFailure.of_exit("actor[2]", "h", -9, last_output="\udcff text\n", peak_mib=3.0)
    return ProgramEnd(
        ProgramResult(
            Outcome.FAILED,
            failures or (first, lost, exited),
            "because",
            15,
            ("actor[3]",),
            (Restart("actor[0]", 1, 0.5, 0.1, None),),
        ),
        {"actor[0]": "Thread\n  x", "actor[1]": "ü"},
    )


def without_parcels(end: ProgramEnd) -> ProgramEnd:
    def strip(each: NodeFailure) -> NodeFailure:
        report = each.report and dataclasses.replace(each.report, parcel=None)
        restarts = tuple(
            dataclasses.replace(restart, failure=restart.failure and strip(restart.failure))
            for restart in each.restarts
        )
        return dataclasses.replace(each, report=report, restarts=restarts)

    failures = tuple(strip(each) for each in end.result.failures)
    return dataclasses.replace(end, result=dataclasses.replace(end.result, failures=failures))


def comparable(record: Record) -> Record:
    return without_parcels(record) if isinstance(record, ProgramEnd) else record


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NODES),
            st.one_of(
                st.binary(max_size=60),
                st.text(max_size=30).map(str.encode),
                st.tuples(
                    st.sampled_from([b"x", "ü".encode(), b"\x80"]), st.integers(0, 30_000)
                ).map(lambda pair: pair[0] * pair[1]),
            ),
        ),
        max_size=12,
    )
)
def test_any_output_arrives_as_it_was_printed(printed: list[tuple[str, bytes]]) -> None:
    with Log() as log:
        for node, data in printed:
            log.writer.show(node, data)
        for node in NODES:
            log.writer.finish(node)
        assert all(len(line) < 16_000 for line in log.data().split(b"\n"))
        records = read(log.lines())
    for node in NODES:
        said = b"".join(data for name, data in printed if name == node)
        if said and not said.endswith(b"\n"):
            said += b"\n"
        assert output_of(records, node) == said


def test_a_line_of_any_length_is_given_without_its_end_and_not_cut_within_a_character() -> None:
    with Log() as log:
        log.writer.show("actor[0]", b"\n")
        log.writer.show("actor[0]", "€".encode() * 10_000 + b"\n")
        for line in log.data().split(b"\n"):
            line.decode()
        assert output_of(read(log.lines()), "actor[0]") == b"\n" + "€".encode() * 10_000 + b"\n"


@given(st.lists(st.tuples(st.integers(0, 26), st.integers(0, 26)), max_size=5))
def test_a_log_that_is_read_again_from_anywhere_counts_once(looks: list[tuple[int, int]]) -> None:
    with Log() as log:
        for number in range(20):
            log.writer.show(NODES[number % 4], b"%d\n" % number)
        log.writer.end(an_end())
        lines = log.lines()
    whole = read(lines)
    reader, found, seen = RecordReader(KEY), list[Record](), 0
    for begin, count in [*looks, (0, len(lines))]:
        start = min(begin, seen)  # a later one would be a gap
        found += read(lines[start : start + count], reader)
        seen = max(seen, min(start + count, len(lines)))
    assert [comparable(each) for each in found] == [comparable(each) for each in whole]


@given(st.integers(1, 10), st.integers(1, 30))
def test_lines_that_are_missing_are_told(first: int, count: int) -> None:
    with Log() as log:
        for number in range(40):
            log.writer.show("actor[0]", b"%d\n" % number)
        lines = log.lines()
    records = read(lines[:first] + lines[first + count :])
    notes = [each.text for each in records if isinstance(each, Note)]
    expected = "1 line of the log was" if count == 1 else f"{count} lines of the log were"
    if first + count >= 40:
        assert notes == []
    else:
        assert notes == [f"{expected} lost"]
    assert len(records) == len(notes) + len(lines[:first] + lines[first + count :])


@given(st.data())
def test_a_stream_that_is_cut_anywhere_gives_nothing_wrong(data: st.DataObject) -> None:
    with Log() as log:
        log.writer.show("actor[0]", b"hello\n")
        log.writer.say(Up())
        log.writer.end(an_end())
        content = log.data()
    cut = data.draw(st.integers(0, len(content)))
    complete = content[:cut].rpartition(b"\n")[0]
    reader = RecordReader(KEY)
    before = read(complete.decode().split("\n") if complete else [], reader)
    after = read(content.decode().split("\n")[:-1], reader)
    assert [comparable(each) for each in before + after] == [
        comparable(each) for each in read(content.decode().split("\n")[:-1])
    ]


def test_all_of_the_end_arrives() -> None:
    end = an_end()
    with Log() as log:
        log.writer.end(end)
        found = read_end(log.lines())
    rebuilt = report_of(found).rebuild()
    assert type(rebuilt) is ValueError
    assert rebuilt.args == ("no such level", 7)
    assert without_parcels(found) == without_parcels(end)


class DangerousError(Exception):
    """Shows when it is unpickled."""

    loaded = 0

    def __reduce__(self) -> object:
        return _load, ()


def _load() -> DangerousError:
    DangerousError.loaded += 1
    return DangerousError()


@pytest.mark.parametrize("key", [None, b"another"])
def test_without_the_right_seal_nothing_is_unpickled(key: bytes | None) -> None:
    with Log() as log:
        log.writer.end(an_end(failure(DangerousError("x"))))
        before = DangerousError.loaded
        found = read_end(log.lines(), key)
    assert isinstance(report_of(found).rebuild(), RemoteError)
    assert DangerousError.loaded == before


def test_a_parcel_that_was_changed_is_dropped() -> None:
    with Log() as log:
        log.writer.end(an_end())
        lines = log.lines()
    number, kind, index, text = lines[0].split(" ", 3)
    seal, _, content = text.partition(" ")
    found = json.loads(content)
    found["result"]["failures"][0]["report"]["parcel"] = ["AAAA"]
    end = read_end([f"{number} {kind} {index} {seal} {json.dumps(found)}"])
    assert report_of(end).parcel is None


@given(
    st.lists(
        st.one_of(
            st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=40),
            st.builds(
                "{} {} {}".format,
                st.integers(-1, 9),
                st.sampled_from(["out", "part", "up", "status", "end", "out+"]),
                st.one_of(
                    st.sampled_from(
                        ["1/1 {}", "1/1 x {}", "2/1 ", "1/2 {", '1/1 {"nodes": 3}', "a[b] c"]
                    ),
                    st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20),
                ),
            ),
        ),
        max_size=10,
    )
)
def test_no_line_whatever_breaks_the_reader(lines: list[str]) -> None:
    read(lines)


def test_what_is_no_record_is_the_supervisors_own_output() -> None:
    records = read(["Traceback:", "1 out a[0] fine", "2 out of memory", "", "01 out a[0] x"])
    assert records == [
        PrintedRecord("supervisor", b"Traceback:\n"),
        PrintedRecord("a[0]", b"fine\n"),
        PrintedRecord("supervisor", b"2 out of memory\n"),
        PrintedRecord("supervisor", b"\n"),
        PrintedRecord("supervisor", b"01 out a[0] x\n"),
    ]


def test_lines_without_a_number_are_told_apart_by_their_time() -> None:
    lines = [
        "2026-01-02T03:04:05.000000001Z stray",
        "2026-01-02T03:04:05.5Z 1 out actor[0] hello",
        "2026-01-02T03:04:05.7Z stray",
    ]
    reader = RecordReader(KEY)
    first = read(lines, reader, stamp="")
    assert first == [
        PrintedRecord("supervisor", b"stray\n"),
        PrintedRecord("actor[0]", b"hello\n"),
        PrintedRecord("supervisor", b"stray\n"),
    ]
    # The two streams of a process are not read at the same time.
    late = "2026-01-02T03:04:05.4Z stray"
    assert read([*lines, late], reader, stamp="") == [PrintedRecord("supervisor", b"stray\n")]


@pytest.mark.parametrize(
    "excuse",
    [
        "unable to retrieve container logs for containerd://5f3a",
        'failed to open log file "/var/log/pods/x/0.log": no such file or directory',
        'failed to try resolving symlinks in path "/var/log/pods/x/0.log": lstat: no such file',
        "1 out a[0] without a time",
    ],
)
def test_what_has_no_time_is_no_part_of_a_log_that_has_times(excuse: str) -> None:
    reader = RecordReader(KEY)
    stamped = "2026-01-02T03:04:05.5Z 1 out a[0] hello"
    found = read([excuse, excuse, stamped, excuse], reader, stamp="")
    assert found == [PrintedRecord("a[0]", b"hello\n")]
    assert reader.last_number == 1


def test_the_status_of_many_nodes_arrives() -> None:
    nodes = [
        NodeStatus(f"actor[{i}]", "running", f"demo-actor-{i}", i, {"": f"h:{i}"}, 1, 0.5, None)
        for i in range(500)
    ]
    with Log() as log:
        log.writer.say(StatusRecord(tuple(nodes)))
        log.writer.say(StatusRecord(()))
        log.writer.say(Up())
        records = read(log.lines())
    assert records == [StatusRecord(tuple(nodes)), StatusRecord(()), Up()]


def test_a_record_whose_piece_is_lost_is_not_read() -> None:
    nodes = [NodeStatus(f"actor[{i}]", "running", "h", i, {}) for i in range(200)]
    with Log() as log:
        log.writer.say(StatusRecord(tuple(nodes)))
        log.writer.say(StatusRecord(tuple(nodes)))
        lines = log.lines()
    assert len(lines) >= 4
    records = read(lines[:1] + lines[2:])
    assert records == [Note("1 line of the log was lost"), StatusRecord(tuple(nodes))]


def test_an_end_that_no_log_keeps_is_told_shortly_and_a_large_exception_as_text() -> None:
    large = failure(ValueError(b"x" * 1_000_000))
    huge = dataclasses.replace(failure(ValueError("x")), last_output="é" * 1_000_000)
    end = an_end(*[dataclasses.replace(huge, node=f"actor[{i}]") for i in range(5)])
    with Log() as log:
        log.writer.end(an_end(large))
        report = report_of(read_end(log.lines()))
    assert (report.parcel, report.type_name) == (None, "ValueError")
    with Log() as log:
        log.writer.end(end)
        assert len(log.data()) < 8 << 20
        found = read_end(log.lines())
    assert [each.node for each in found.result.failures] == [f"actor[{i}]" for i in range(5)]
    assert found.result.outcome is Outcome.FAILED


def test_a_log_that_cannot_be_written_to_ends_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        records = RecordWriter(writer, KEY)
        records.show("a[0]", b"nobody hears it\n")
        records.drain(20.0)
    finally:
        os.close(writer)
