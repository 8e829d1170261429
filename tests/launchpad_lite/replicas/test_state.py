"""What is kept of a training."""

import threading
from pathlib import Path

import numpy as np
import pytest

from launchpad_lite import replicas
from launchpad_lite.replicas._state import Training


def test_a_snapshot_is_taken_between_two_steps(tmp_path: Path) -> None:
    training = Training()
    weights = {"w": np.zeros(2)}
    training.begin({"weights": weights})
    saving = threading.Thread(target=training.save, args=(tmp_path,))
    saving.start()
    while saving.is_alive():
        training.between_steps()
        weights["w"] += 1
        training.step += 1
    saving.join()
    restored = Training()
    restored.restore(tmp_path)
    assert restored.snapshot is not None
    np.testing.assert_array_equal(
        restored.snapshot.kept["weights"]["w"], np.full(2, restored.snapshot.step)
    )


def test_what_was_last_is_saved_when_no_more_steps_are_made(tmp_path: Path) -> None:
    training = Training()
    training.begin({"numbers": [1, 2]})
    training.step = 7
    training.take()
    training.end()
    training.save(tmp_path)
    restored = Training()
    restored.restore(tmp_path)
    assert restored.snapshot == (7, {"numbers": [1, 2]})


def test_nothing_is_restored_where_nothing_was_saved(tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path)
    training.restore(tmp_path)
    assert training.snapshot is None


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(TypeError, match=r"rate: a float cannot be kept: give something with"):
        replicas.NonReplicator().keep(rate=0.1)
