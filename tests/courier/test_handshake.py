"""What is said before the first frame, and what of it a stranger understands."""

import pytest

import courier
from courier._engine.handshake import (
    LENGTH,
    NAME_BYTES,
    ClientHandshake,
    Introduction,
    ServerHandshake,
)

_NAME = "ab" * NAME_BYTES
_WORDS = {
    "host": "boot/4026531840",
    "local": "courier/socket",
    "idempotent": ("look_up",),
    "methods": ("look_up", "store"),
    "refusal": "not today",
}


def _answer(secret: courier.Secret | None, **told: object) -> tuple[bytes, Introduction]:
    """Returns what a server says, and what its client understands."""
    client = ClientHandshake(secret)
    server = ServerHandshake(secret, Introduction(_NAME, **told))  # type: ignore[arg-type]
    welcome = server.welcome(client.hello())
    return welcome, client.prove(welcome[LENGTH.size :])[1]


def test_only_who_holds_the_secret_reads_the_introduction(secret: courier.Secret) -> None:
    welcome, understood = _answer(secret, **_WORDS)
    assert understood == Introduction(_NAME, **_WORDS)  # type: ignore[arg-type]
    for words in (_NAME, "name", "boot", "4026531840", "courier", "look_up", "store", "not today"):
        assert words.encode() not in welcome


def test_an_introduction_never_looks_the_same_twice(secret: courier.Secret) -> None:
    (first, _), (second, _) = _answer(secret, **_WORDS), _answer(secret, **_WORDS)
    behind_the_proof = -len(Introduction(_NAME).encode())
    assert first[behind_the_proof:] != second[behind_the_proof:]


@pytest.mark.parametrize("word", _WORDS)
def test_the_length_of_an_introduction_does_not_tell_what_is_in_it(
    secret: courier.Secret, word: str
) -> None:
    assert len(_answer(secret, **{word: _WORDS[word]})[0]) == len(_answer(secret)[0])
