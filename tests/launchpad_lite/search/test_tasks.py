"""Tasks as users write them, on their way to a broker."""

import math
import pickle
from typing import Any

import numpy as np
import pytest

from launchpad_lite.search._messages import Limits
from launchpad_lite.search.tasks import Call, Foreign, submission_of


def call(**options: Any) -> Call:
    task = Call(abs, -1)
    for name, value in options.items():
        setattr(task, name, value)
    return task


def test_numbers_of_numpy_become_those_that_databases_take() -> None:
    task = call(priority=np.int64(3), retries=np.int32(2), timeout_s=np.float32(1.5))
    options = submission_of(task, "key")[3:]
    assert options == (3.0, 2, Limits(1.5))
    assert [type(each) for each in (*options[:2], options[2].timeout_s)] == [float, int, float]


@pytest.mark.parametrize(
    "options",
    [
        {"priority": "high"},
        {"retries": 1.5},
        {"timeout_s": "soon"},
        {"progress_timeout_s": ()},
        {"memory_bytes": 1.5},
    ],
)
def test_what_is_no_number_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"abs\(-1\): its priority, retries and limits are"):
        submission_of(call(**options), "key")


@pytest.mark.parametrize(
    "options",
    [
        {"priority": float("nan")},
        {"retries": -1},
        {"timeout_s": 0},
        {"progress_timeout_s": math.inf},
        {"memory_bytes": -1},
        {"gpus": -1},
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"abs\(-1\): its"):
        submission_of(call(**options), "key")


def test_a_foreign_task_is_bytes() -> None:
    with pytest.raises(TypeError, match="the payload of a foreign task is bytes, not '1'"):
        Foreign("js", "1")  # type: ignore[arg-type]


def test_params_of_a_call_are_its_arguments_and_cannot_be_set():
    task = Call(dict, rate=1)
    with pytest.raises(AttributeError, match="params"):
        task.params = {"rate": 2}
    with pytest.raises(TypeError, match="does not support item assignment"):
        task.params["rate"] = 2
    assert pickle.loads(pickle.dumps(task)).params == {"rate": 1}


def test_a_call_shows_itself_shortly_whatever_its_arguments_are() -> None:
    task = Call(len, bytes(1 << 24), text="x" * 1000, values=[1, 2, 3])
    assert repr(task).startswith("len(<16,777,216 bytes>, text='xxx")
    assert repr(task).endswith("values=[1, 2, 3])")
    assert len(repr(task)) < 600
