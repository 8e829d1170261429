"""What of the words of nodes a terminal gets."""

import pytest

from launchpad_lite.parts.escapes import shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain \u00e9\u4e2d\U0001f600", "plain \u00e9\u4e2d\U0001f600"),
        ("\x1b[1;31mred\x1b[0m\t10%\r20%\r\n", "\x1b[1;31mred\x1b[0m\t10%\r20%\r\n"),
        ("\x1b[38:2:1:2:3mred\x1b[m", "\x1b[38:2:1:2:3mred\x1b[m"),
        ("\x1b[2J\x1b[5;9Hthere\x1b[?25l\x1b[>4;2m\x1b[1 q", "there"),
        ("\x1b]8;;http://a.b\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1bc\x1bM\x1b7\x1b(0", r"\x1bc\x1bM\x1b7\x1b(0"),
        ("\x1b]0;title\x07\x1b]52;c;aGk=\x07", r"\x1b]0;title\x07\x1b]52;c;aGk=\x07"),
        ("\x1bPq#0\x1b\\.\x1b_G\x1b\\.", r"\x1bPq#0\x1b\.\x1b_G\x1b\."),
        ("\b\v\f\x00\x7f", r"\x08\x0b\x0c\x00\x7f"),
        ("\x9b2J\x9d0;t\x9c", r"\x9b2J\x9d0;t\x9c"),
        ("\udc9b2J", r"\udc9b2J"),  # how Python keeps a byte that is no text
        ("\x1b\x1b[2J[31m", r"\x1b[31m"),  # what is left makes no new sequence
        ("\x1b]8;;a\x1bc\x1b\\.", r"\x1b]8;;a\x1bc\x1b\."),
        ("\x1b[31", r"\x1b[31"),
    ],
)
def test_colours_pass_and_what_a_terminal_would_obey_does_not(text: str, expected: str) -> None:
    assert shown(text) == expected
    assert shown(expected) == expected
