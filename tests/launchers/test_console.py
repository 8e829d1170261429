"""What the console does with output that has no lines, or nowhere to go."""

import io
import sys

import pytest

from launchers._console import Console


@pytest.mark.parametrize("closed", [True, False])
def test_a_console_that_is_gone_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream if closed else None)
    Console().show("node[0]", b"text\n")


def test_a_line_without_end_is_shown_in_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    for _ in range(100):
        console.show("bar[0]", b"\r" + b"#" * 65535)
    console.finish("bar[0]")
    assert sum(line.count("#") for line in capsys.readouterr().out.splitlines()) == 6553500
