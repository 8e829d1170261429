"""Which of a host's addresses the others use, once it is known which of them answer."""

from collections.abc import Mapping, Sequence

import pytest

from launchers.hosts.reachability import LAUNCHER, choose_addresses

_BRIDGE = "172.17.0.1"
_FIRST, _SECOND = "10.0.0.1", "192.168.0.1"


def everybody_reaches(**addresses: list[str]) -> dict[str, dict[str, list[str]]]:
    return {
        caller: {host: found for host, found in addresses.items() if host != caller}
        for caller in (LAUNCHER, *addresses)
    }


def test_the_address_that_answers_is_chosen_and_not_the_likeliest() -> None:
    views = choose_addresses(
        {"h1": [_BRIDGE, "10.0.0.1"], "h2": [_BRIDGE, "10.0.0.2"]},
        everybody_reaches(h1=["10.0.0.1"], h2=["10.0.0.2"]),
    )
    assert views.address("h1", "h2") == "10.0.0.2"
    assert views.address("h2", "h1") == "10.0.0.1"
    assert views.address(LAUNCHER, "h1") == "10.0.0.1"
    # A host calls itself as others call it.
    assert views.address("h1", "h1") == "10.0.0.1"


@pytest.mark.parametrize(
    ("reached", "used"),
    [
        # Of several that answer, all take the likeliest,
        ([[_FIRST, _SECOND]] * 3, [_FIRST] * 3),
        # but rather the one that most can use,
        ([[_SECOND], [_FIRST, _SECOND], [_SECOND]], [_SECOND] * 3),
        # and who cannot use that one takes another.
        ([[_SECOND], [_FIRST], [_FIRST]], [_SECOND, _FIRST, _FIRST]),
    ],
)
def test_all_use_the_same_address_as_far_as_they_can(
    reached: Sequence[Sequence[str]], used: Sequence[str]
) -> None:
    callers = (LAUNCHER, "h2", "h3")
    reach: Mapping[str, Mapping[str, Sequence[str]]] = {
        "h1": {},
        **{caller: {"h1": found} for caller, found in zip(callers, reached, strict=True)},
    }
    views = choose_addresses({"h1": [_FIRST, _SECOND], "h2": [], "h3": []}, reach)
    assert [views.address(each, "h1") for each in callers] == used


def test_who_is_reached_by_nobody_is_missing_and_it_is_known_what_was_tried() -> None:
    views = choose_addresses(
        {"h1": ["10.0.0.1"], "h2": ["10.0.0.2"]},
        {LAUNCHER: {"h1": ["10.0.0.1"]}, "h1": {}, "h2": {"h1": ["10.0.0.1"]}},
    )
    assert views.missing([("h1", "h2"), ("h2", "h1"), ("h1", "h1"), ("h1", "h2")]) == [("h1", "h2")]
    assert views.tried["h2"] == ["10.0.0.2"]


def test_a_host_without_any_address_is_missing() -> None:
    views = choose_addresses({"h1": []}, {LAUNCHER: {}, "h1": {}})
    assert views.missing([(LAUNCHER, "h1")]) == [(LAUNCHER, "h1")]
    assert views.address("h1", "h1") is None
