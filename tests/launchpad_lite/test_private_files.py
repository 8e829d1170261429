"""What is written where others may write as well stays this user's own."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from launchpad_lite._private_files import check_folder, make_folder, open_private

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


@pytest.mark.parametrize(
    "arrange",
    [
        _below_everybodys,
        pytest.param(_of_a_stranger, marks=needs_root),
        pytest.param(_by_the_link_of_a_stranger, marks=needs_root),
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
