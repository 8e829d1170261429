"""What is written and read where others may write as well is this user's own."""

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from launchpad_lite.parts.private_files import (
    check_folder,
    check_own_folder,
    make_folder,
    make_own_folder,
    open_private,
    read_private,
    write_private,
)

_STRANGER = 4711
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: needs root")


@pytest.fixture(autouse=True)
def _in_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def _make(path: Path, mode: int, owner: int = -1) -> Path:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, -1)
    return path


def _below_everybodys(folder: Path) -> Path:
    return _make(_make(folder / "guilty", 0o777) / "mine", 0o700)


def _of_a_stranger(folder: Path) -> Path:
    return _make(_make(folder / "temporary", 0o1777) / "guilty", 0o700, _STRANGER)


def _by_the_link_of_a_stranger(folder: Path) -> Path:
    link = _make(folder / "temporary", 0o1777) / "guilty"
    link.symlink_to(_make(folder / "mine", 0o700))
    os.chown(link, _STRANGER, -1, follow_symlinks=False)
    # The kernel itself follows no such link, where it is set up to: it is refused either way.
    return link / "below"


def _by_our_link_to_that_of_a_stranger(folder: Path) -> Path:
    (folder / "ours").symlink_to(_by_the_link_of_a_stranger(folder).parent)
    return folder / "ours" / "below"


@pytest.mark.parametrize(
    "arrange",
    [
        _below_everybodys,
        pytest.param(_of_a_stranger, marks=needs_root),
        pytest.param(_by_the_link_of_a_stranger, marks=needs_root),
        pytest.param(_by_our_link_to_that_of_a_stranger, marks=needs_root),
    ],
)
def test_a_folder_where_a_stranger_could_replace_files_is_refused(
    arrange: Callable[[Path], Path], tmp_path: Path
) -> None:
    with pytest.raises(PermissionError, match="guilty"):
        make_folder(arrange(tmp_path))


def _below_a_sticky_one(folder: Path) -> Path:
    return _make(_make(folder / "temporary", 0o1777) / "mine", 0o700)


def _of_a_group(folder: Path) -> Path:
    return _make(_make(folder / "project", 0o2775) / "mine", 0o775)


def _of_somebody_who_was_let_in(folder: Path) -> Path:
    return _make(_make(folder / "project", 0o755, _STRANGER) / "mine", 0o755, _STRANGER)


def _by_a_link(folder: Path) -> Path:
    (folder / "link").symlink_to(_make(folder / "mine", 0o700))
    return folder / "link"


@pytest.mark.parametrize(
    "arrange",
    [
        _below_a_sticky_one,
        _of_a_group,
        pytest.param(_of_somebody_who_was_let_in, marks=needs_root),
        _by_a_link,
    ],
)
def test_a_folder_that_only_those_who_were_let_in_may_write_to_is_taken(
    arrange: Callable[[Path], Path], tmp_path: Path
) -> None:
    check_folder(arrange(tmp_path))


def test_in_a_pod_a_volume_for_everybody_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    check_folder(_below_everybodys(tmp_path))


def _closed(folder: Path) -> Path:
    return _make(_make(folder / "project", 0o2775) / "mine", 0o755)


def test_a_folder_of_our_own_may_lie_in_one_of_a_group(tmp_path: Path) -> None:
    check_own_folder(_closed(tmp_path))
    make_own_folder(tmp_path / "project" / "new")


def _of_a_member(folder: Path) -> Path:
    os.chown(_closed(folder), _STRANGER, -1)
    return folder / "project" / "mine"


@pytest.mark.parametrize(
    ("arrange", "told"),
    [
        (_of_a_group, r"drwxrwxr-x, of user \d+.*: chmod go-w /.*/project/mine"),
        (_by_a_link, r"lrwxrwxrwx, of user \d+.*: rm /.*/link"),
        pytest.param(
            _of_a_member,
            r"drwxr-xr-x, of user 4711.*: chown -R root /.*/project/mine",
            marks=needs_root,
        ),
    ],
)
def test_a_folder_that_is_not_our_own_is_refused_with_the_command_that_corrects_it(
    arrange: Callable[[Path], Path], told: str, tmp_path: Path
) -> None:
    folder = arrange(tmp_path)
    for refused in (check_own_folder, make_own_folder):
        with pytest.raises(PermissionError, match=told):
            refused(folder)


@needs_root
def test_in_a_pod_what_the_kubelet_gave_to_a_group_stays_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    claim = _make(tmp_path / "claim", 0o2775)
    check_own_folder(_make(claim / "mine", 0o2770, _STRANGER))


@needs_root
def test_on_a_drive_that_maps_users_what_we_make_is_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _of_a_member(tmp_path)

    def made_by_the_drive(dir: Path) -> BinaryIO:  # noqa: A002 - as it is called
        file = _temporary_file(dir=dir)
        os.chown(file.fileno(), _STRANGER, -1)
        return file

    _temporary_file: Any = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", made_by_the_drive)
    check_own_folder(folder)
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="chown -R root"):
        check_own_folder(folder)


def test_all_folders_that_are_made_are_for_this_user_only(tmp_path: Path) -> None:
    umask = os.umask(0o002)
    try:
        make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    made = [tmp_path / "a", tmp_path / "a" / "b"]
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o700, 0o700]


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """Leads to a file of ours."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to("precious")
    return tmp_path / "link"


def test_nothing_is_added_to_what_a_link_leads_to(link: Path) -> None:
    with pytest.raises(OSError, match="link"):
        open_private(link)


def test_a_new_file_takes_the_place_of_a_link(link: Path) -> None:
    os.close(open_private(link, is_new=True))
    assert link.lstat().st_mode == stat.S_IFREG | 0o600
    assert link.with_name("precious").read_text() == "mine"


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A file of ours that the user has named by a link."""
    umask = os.umask(0)
    try:
        write_private(tmp_path / "file", b"older")
        write_private(tmp_path / "file", b"text")
    finally:
        os.umask(umask)
    (tmp_path / "named").symlink_to("file")
    return tmp_path / "named"


def test_a_file_is_written_for_this_user_only_and_read_where_the_user_says(named: Path) -> None:
    assert read_private(named) == b"text"
    assert stat.S_IMODE(named.stat().st_mode) == 0o600
    assert sorted(each.name for each in named.parent.iterdir()) == ["file", "named"]


def _make_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_make_a_fifo, "it is prw-------, of user"),
        (lambda file: file.chmod(0o620), "it is -rw--w----, of user"),
        pytest.param(lambda file: os.chown(file, _STRANGER, -1), "of user 4711", marks=needs_root),
    ],
)
def test_a_file_that_others_could_have_written_is_not_read(
    spoil: Callable[[Path], object], told: str, named: Path
) -> None:
    spoil(named.resolve())
    with pytest.raises(PermissionError, match=told):
        read_private(named)


def test_nothing_waits_for_the_reader_of_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="No such device"):
        open_private(tmp_path / "log")
