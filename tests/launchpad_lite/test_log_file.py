"""A log that is limited keeps how it began and what was said last, in whole lines."""

from pathlib import Path

import pytest

from launchpad_lite.parts.log_file import LogFile, log_pieces, read_log


def _write(path: Path, limit_bytes: float, pieces: list[bytes]) -> None:
    log = LogFile(path, limit_bytes)
    for piece in pieces:
        log.write(piece)
    log.close()


def _lines(count: int) -> list[bytes]:
    return [b"line %06d\n" % number for number in range(count)]  # of 12 bytes


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 12, 1000, 100_000])
def test_the_beginning_and_the_end_are_kept_and_no_line_is_torn(tmp_path: Path, size: int) -> None:
    path, lines = tmp_path / "0.log", _lines(2000)
    _write(path, 3000, _cut(b"".join(lines), size))
    kept = [*read_log(path)]
    (gap,) = (number for number, line in enumerate(kept) if line.startswith(b"["))
    begun, ended = kept[:gap], kept[gap + 1 :]
    assert begun == lines[: len(begun)]
    assert ended == lines[-len(ended) :]
    assert len(begun) in (83, 84)  # a third of the limit
    assert len(ended) >= 83
    assert sum(each.stat().st_size for each in log_pieces(path)) < 3000 + 3 * 12 + len(kept[gap])
    assert [each.name for each in log_pieces(path)] == ["0.log.first", "0.log.1", "0.log"]


def test_what_fits_is_all_there_whoever_opens_it_again(tmp_path: Path) -> None:
    path, lines = tmp_path / "0.log", _lines(200)
    for line in lines:
        _write(path, 3000, [line])
    assert [*read_log(path)] == lines
    assert len(log_pieces(path)) == 3


def test_a_line_that_never_ends_is_limited_too(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    _write(path, 3000, [b"\r" + b"#" * 65535] * 100)
    assert sum(each.stat().st_size for each in log_pieces(path)) < 4 << 20
    assert path.stat().st_size > 0


def test_new_files_are_ours_alone_and_follow_no_link(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    (tmp_path / "victim").write_text("mine")
    for name in ("0.log.first", "0.log.1"):
        (tmp_path / name).symlink_to("victim")
    with pytest.raises(OSError):  # noqa: PT011 - the note of the gap goes by a link
        _write(path, 3000, _lines(2000))
    assert (tmp_path / "victim").read_text() == "mine"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    path, lines = tmp_path / "0.log", _lines(200)
    log = LogFile(path, 3000)
    log.write(lines[0])
    path.unlink()
    for line in lines[1:]:
        log.write(line)
    log.close()
    assert [*read_log(path)][-50:] == lines[-50:]
