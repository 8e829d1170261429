"""What users may ask for about the life of a node, and what they are told if it cannot be."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import launchpad_lite as lp
from launchpad_lite.launching import LaunchOptions, Liveness, RestartPolicy, RestartWhen

NEVER = RestartPolicy("never")

seconds = st.floats(0, 1e9)
chances = st.floats(0, 1)


# Restart policies


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("never", NEVER),
        ("on_failure", RestartPolicy()),
        (RestartWhen.ALWAYS, RestartPolicy("always")),
        (RestartPolicy("always", 7), RestartPolicy(RestartWhen.ALWAYS, 7)),
        ({"when": "always", "max_restarts": 7}, RestartPolicy("always", 7)),
        ({}, RestartPolicy()),
        ({"window_s": math.inf}, RestartPolicy(window_s=math.inf)),
    ],
)
def test_a_policy_may_be_written_shortly(given_: Any, expected: RestartPolicy) -> None:
    assert RestartPolicy.of(given_) == expected


@pytest.mark.parametrize(
    ("given_", "error", "text"),
    [
        ("sometimes", ValueError, "is one of 'never', 'on_failure', 'always', not 'sometimes'"),
        ({"when": None}, ValueError, "is one of 'never', 'on_failure', 'always', not None"),
        ({"when": ["never"]}, ValueError, "a restart policy is one of"),
        ({"max_restart": 3}, ValueError, "did you mean 'max_restarts'?); known are when, max_"),
        ({1: 2, "z": 3}, ValueError, "unknown setting 'z'; known are when"),
        ({"max_restarts": -1}, ValueError, "max_restarts is at least 0, not -1"),
        ({"window_s": 0}, ValueError, "window_s cannot be 0"),
        ({"window_s": math.nan}, ValueError, "window_s cannot be nan"),
        ({"backoff_s": -0.1}, ValueError, "backoff_s cannot be -0.1"),
        ({"backoff_s": math.inf}, ValueError, "backoff_s cannot be inf"),
        ({"max_backoff_s": math.inf}, ValueError, "max_backoff_s cannot be inf"),
        ({"window_s": 10**400}, ValueError, "window_s cannot be"),
        ({"backoff_s": 10**400}, ValueError, "backoff_s cannot be"),
        ({"jitter": -0.1}, ValueError, "jitter cannot be -0.1"),
        ({"jitter": 1.1}, ValueError, "jitter is a part of the delay, 0 to 1, not 1.1"),
        (None, TypeError, "expected lp.RestartPolicy, its name or a dict, got None"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts is a whole number, not 1.5"),
        ({"max_restarts": True}, TypeError, "max_restarts is a whole number, not True"),
        ({"window_s": "10"}, TypeError, "window_s is a number, not '10'"),
        ({"backoff_s": None}, TypeError, "backoff_s is a number, not None"),
        ({"jitter": False}, TypeError, "jitter is a number, not False"),
        ({"moves": "h2"}, TypeError, "moves is True or False, not 'h2'"),
    ],
)
def test_policies_that_cannot_be_are_refused(
    given_: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        RestartPolicy.of(given_)


def test_policies_tell_what_they_are() -> None:
    assert str(NEVER) == ""
    assert str(RestartPolicy("always", 5, 60)) == "restart=always, at most 5 in 60 s"
    bound = RestartPolicy("always", 5, 60, moves=False)
    assert str(bound) == "restart=always, at most 5 in 60 s, moves=False"


@settings(max_examples=300)
@given(
    policy=st.builds(
        RestartPolicy, backoff_s=seconds, max_backoff_s=seconds, jitter=st.floats(0, 1)
    ),
    failures=st.integers(0, 10_000),
    chance=chances,
)
def test_delays_stay_within_their_bounds(
    policy: RestartPolicy, failures: int, chance: float
) -> None:
    delay_s = policy.delay_s(failures, chance)
    plain_s = min(policy.backoff_s, policy.max_backoff_s)
    assert plain_s * (1 - policy.jitter) * (1 - 1e-9) <= delay_s
    assert delay_s <= policy.max_backoff_s * (1 + policy.jitter) * (1 + 1e-9)
    assert delay_s <= policy.delay_s(failures + 1, chance)
    assert policy.delay_s(failures, 0.0) <= delay_s <= policy.delay_s(failures, 1.0)


def test_delays_double_up_to_a_limit() -> None:
    policy = RestartPolicy(backoff_s=0.1, max_backoff_s=1.0, jitter=0.0)
    delays = [policy.delay_s(failures, 0.5) for failures in (*range(7), 10**6)]
    assert delays == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])
    assert [RestartPolicy(backoff_s=10.0).delay_s(1, chance) for chance in (0.0, 1.0)] == [
        8.0,
        12.0,
    ]


# Liveness


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"heartbeat_s": 30}, Liveness(heartbeat_s=30)),
        ({}, Liveness()),
        (Liveness(health_s=1), Liveness(health_s=1)),
    ],
)
def test_limits_may_be_written_shortly(given_: Any, expected: Liveness) -> None:
    assert Liveness.of(given_) == expected


@pytest.mark.parametrize(
    ("given_", "error", "text"),
    [
        (30, TypeError, "expected lp.Liveness, as lp.Liveness(heartbeat_s=30), or a dict, got 30"),
        ({"health_s": "1"}, TypeError, "health_s is a number, not '1'"),
        ({"health_s": True}, TypeError, "health_s is a number, not True"),
        ({"health_s": 0}, ValueError, "health_s cannot be 0"),
        ({"startup_s": -1}, ValueError, "startup_s cannot be -1"),
        ({"heartbeat_s": math.inf}, ValueError, "heartbeat_s cannot be inf"),
        ({"heartbeat": 30}, ValueError, "did you mean 'heartbeat_s'?); known are health_s, heart"),
    ],
)
def test_limits_that_cannot_be_are_refused(given_: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Liveness.of(given_)


def test_a_heartbeat_may_be_as_late_as_its_report() -> None:
    limits = Liveness(heartbeat_s=10.0)
    assert limits.heartbeat_report_s == 0.5
    assert limits.heartbeat_deadline_s == 10.5
    assert Liveness().heartbeat_report_s is None
    assert Liveness().heartbeat_deadline_s is None


def test_limits_tell_what_they_are() -> None:
    assert str(Liveness()) == ""
    assert str(Liveness(health_s=5, startup_s=60)) == "health_s=5, startup_s=60"


# Numbers of numpy

NUMBERS = [np.float16, np.float32, np.float64]


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.filterwarnings("error")
def test_limits_are_numbers_of_numpy_too_if_they_are_finite(kind: type[Any]) -> None:
    assert str(Liveness(health_s=kind(2))) == "health_s=2"
    seconds = RestartPolicy(backoff_s=kind(2)).backoff_s, lp.Checkpoints(".", kind(2)).period_s
    # A lock or a queue does not wait for seconds of another type.
    assert {type(each) for each in (*seconds, Liveness(health_s=kind(2)).health_s)} == {float}
    for value in ("inf", "nan"):
        with pytest.raises(ValueError, match=f"health_s cannot be {value}"):
            Liveness(health_s=kind(value))
        with pytest.raises(ValueError, match=f"cpu cannot be {value}"):
            lp.Resources(cpu=kind(value))


@pytest.mark.parametrize("kind", [*NUMBERS, np.int64])
def test_the_limit_of_logs_is_told_to_the_agent_as_a_plain_number(kind: type[Any]) -> None:
    assert json.dumps(LaunchOptions(log_limit_mib=kind(3)).log_limit_bytes) == "3145728.0"
