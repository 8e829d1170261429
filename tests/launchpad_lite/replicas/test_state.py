"""What is kept of a training."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launchpad_lite as lp
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
    for rate in (0.1, np.float64(0.1)):
        with pytest.raises(TypeError, match=r"rate: a float\d* cannot be kept: give something"):
            replicas.NonReplicator().keep(rate=rate)


def training_after(**kept: Any) -> Training:
    training = Training()
    training.begin(kept)
    training.step = 7
    training.take()
    return training


def test_what_is_restored_shares_nothing_with_the_snapshot() -> None:
    training = training_after(means=[[0.0]])
    for _ in range(2):
        restored = training.newest(["means"], is_first=True)
        assert restored == (7, {"means": [[0.0]]})
        restored.kept["means"][0][0] += 1.0


def test_a_snapshot_without_what_is_kept_now_is_refused() -> None:
    training = training_after(model=[1], optimizer=[2])
    with pytest.raises(replicas.ReplicaError, match=r"has no net, but model, optimizer"):
        training.newest(["net"], is_first=True)
    with pytest.raises(replicas.ReplicaError, match=r"has no ema"):
        training.newest(["model", "ema"], is_first=False)
    assert training.newest(["ema"], is_first=False) is None
    assert training_after().newest(["net"], is_first=True) is None


def test_what_is_kept_later_neither_changes_nor_takes_steps_back() -> None:
    repl = replicas.NonReplicator()
    repl.keep(first=[1])
    list(repl.run(lambda: 1, steps=2))
    second = {"two": 2}
    repl.keep(second=second)
    assert second == {"two": 2}
    assert repl.step == 2


def test_only_replica_0_saves_what_is_kept(tmp_path: Path) -> None:
    def train(repl: replicas.Replicator) -> None:
        repl.keep(weights=[1, 2])
        list(repl.run(lambda: 1, steps=3))

    options = {"checkpoints": {"replica": lp.Checkpoints(tmp_path)}}
    replicas.MultiWorkerReplicator(2).launch(train, launcher="test_mt", launch_options=options)
    for index, kept in enumerate([{"weights": [1, 2]}, {}]):
        training = Training()
        [folder] = (tmp_path / "replica" / str(index)).glob("*/state")
        training.restore(folder)
        assert training.snapshot == (3, kept)


def test_no_save_waits_for_steps_that_do_not_come(tmp_path: Path) -> None:
    repl = replicas.NonReplicator()
    list(repl.run(lambda: 1, steps=3))
    repl._me.training.save(tmp_path)
