"""Replay buffers: what a table decides, and programs with actors and learners."""

import collections
import itertools
import os
import pickle
import random
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launchpad_lite as lp
from launchpad_lite import rollouts
from launchpad_lite.rollouts import Table
from launchpad_lite.rollouts._table import (
    InsertBatch,
    MissingStepsError,
    ReplayTable,
    SampledItems,
    SentItems,
    SumTree,
)
from launchpad_lite.testing import poll_until
from launchpad_lite.testing.programs import ProgramLauncher

#: How many orders are tried: more with LAUNCHPAD_SEEDS.
_SEEDS = int(os.environ.get("LAUNCHPAD_SEEDS", "20"))


def table(**options: Any) -> ReplayTable:
    return ReplayTable(Table(**{"max_size": 100, **options}), seed=1)


def batch(
    keys: Sequence[int],
    priorities: Sequence[float] | None = None,
    *,
    stream: int = 1,
    first: int | None = None,
    steps_of: Sequence[Sequence[int]] | None = None,
    sent: Sequence[int] = (),
) -> InsertBatch:
    """Returns items that are their keys, and steps that are theirs."""
    steps = np.array(steps_of or np.zeros((len(keys), 0)), np.int64)
    return InsertBatch(
        stream,
        keys[0] if first is None else first,
        {"item": f"int64 with {steps.shape[1]} steps"},
        b"",
        np.array(keys, np.int64),
        np.array([1.0] * len(keys) if priorities is None else priorities),
        [np.array(keys, np.int64)],
        steps,
        np.array(sent, np.int64),
        [np.array(sent, np.int64)] if steps.shape[1] else [],
    )


def sampled(replay: ReplayTable, count: int) -> SampledItems:
    found = replay.sample(count, 0.0)
    assert found is not None
    assert found.own[0].tolist() == found.keys.tolist()
    return found


def kept(replay: ReplayTable) -> list[int]:
    state = replay.state()
    replay.let_go()
    return sorted(state.items.keys.tolist())


def test_a_sum_tree_agrees_with_a_list_of_weights() -> None:
    for seed in range(_SEEDS):
        rng = np.random.default_rng(seed)
        places = int(rng.integers(1, 40))
        tree, weights = SumTree(places), np.zeros(places)
        for _ in range(20):
            chosen = rng.integers(places, size=rng.integers(1, 10))
            values = rng.choice([0.0, 0.1, 1.0, 1e9, 1e-9], len(chosen))
            tree.set(chosen, values)
            weights[chosen] = values
            assert tree.total == pytest.approx(weights.sum())
            assert tree.get(np.arange(places)).tolist() == weights.tolist()
            if tree.total:
                # The upper end is just outside, where rounding may lead.
                found = tree.find(np.append(rng.random(50), 1.0) * tree.total)
                assert (weights[found] > 0).all()
        whole = rng.integers(1, 5, places).astype(float)
        tree.set(np.arange(places), whole)
        found = tree.find(np.arange(whole.sum()))
        assert np.bincount(found, minlength=places).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"sampler": "uniform"}, [1, 1, 1, 1]),
        ({"sampler": "prioritized"}, [0, 1, 2, 5]),
        ({"sampler": "prioritized", "priority_exponent": 2.0}, [0, 1, 4, 25]),
        ({"sampler": "prioritized", "priority_exponent": 0.0}, [1, 1, 1, 1]),
        ({"sampler": "fifo"}, [1, 0, 0, 0]),
        ({"sampler": "lifo"}, [0, 0, 0, 1]),
    ],
)
def test_a_sampler_chooses_each_item_with_the_probability_that_it_tells(
    options: dict[str, Any], weights: list[float]
) -> None:
    replay = table(**options)
    replay.insert(batch(range(4), [0, 1, 2, 5]), 0.0)
    found = sampled(replay, 20_000)
    expected = np.array(weights) / sum(weights)
    shares = np.bincount(found.keys, minlength=4) / 20_000
    assert shares == pytest.approx(expected, abs=0.02)
    assert found.probabilities == pytest.approx(expected[found.keys])
    assert found.priorities.tolist() == np.array([0.0, 1, 2, 5])[found.keys].tolist()
    assert (found.table_size, len(replay)) == (4, 4)


def test_without_any_priority_above_0_items_are_sampled_alike() -> None:
    replay = table(sampler="prioritized", remover="prioritized", max_size=4)
    replay.insert(batch(range(8), [0.0] * 8), 0.0)
    assert len(replay) == 4
    assert len(set(sampled(replay, 100).keys.tolist())) == 4


def test_priorities_change_in_batches_and_those_of_lost_items_do_not_matter() -> None:
    replay = table(sampler="prioritized")
    replay.insert(batch(range(4)), 0.0)
    assert replay.update_priorities(np.array([0, 1, 3, 77]), np.array([0.0, 0.0, 0.0, 9.0])) == 3
    assert set(sampled(replay, 100).keys.tolist()) == {2}
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"at least 0 and at most .*; not {bad}"):
            replay.update_priorities(np.array([2]), np.array([bad]))
        with pytest.raises(ValueError, match=f"at least 0 and at most .*; not {bad}"):
            replay.insert(batch([9], [bad]), 0.0)
    assert len(replay) == 4


@pytest.mark.parametrize(
    ("remover", "stays"), [("fifo", [3, 4, 5]), ("lifo", [0, 1, 5]), ("prioritized", [0, 4, 5])]
)
def test_a_remover_makes_room_in_a_full_table(remover: str, stays: list[int]) -> None:
    replay = table(max_size=3, remover=remover)
    weights = {0: 0.0, 1: 1.0, 2: 1.0} if remover == "prioritized" else dict.fromkeys(range(3), 1.0)
    replay.insert(batch(range(3), list(weights.values())), 0.0)
    if remover == "fifo":
        replay.insert(batch([3]), 0.0)
    replay.insert(batch([4, 5]) if remover != "lifo" else batch([5]), 0.0)
    assert kept(replay) == stays


def test_a_batch_that_is_larger_than_the_table_leaves_its_last_items() -> None:
    replay = table(max_size=3)
    assert replay.insert(batch(range(10)), 0.0)
    assert kept(replay) == [7, 8, 9]


@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "fifo", "lifo"])
def test_an_item_goes_when_it_was_sampled_as_often_as_it_may(sampler: str) -> None:
    replay = table(sampler=sampler, max_times_sampled=3)
    replay.insert(batch(range(10)), 0.0)
    seen: collections.Counter[int] = collections.Counter()
    for count in (1, 7, 12, 10):
        seen.update(sampled(replay, count).keys.tolist())
    assert seen == dict.fromkeys(range(10), 3)
    assert len(replay) == 0
    assert replay.sample(1, 0.0) is None


def test_an_item_is_inserted_once_even_if_it_was_sampled_away_meanwhile() -> None:
    replay = table(sampler="fifo", max_times_sampled=1)
    replay.insert(batch([0, 1, 2]), 0.0)
    assert sampled(replay, 2).keys.tolist() == [0, 1]
    assert replay.insert(batch([0, 1, 2]), 0.0)
    assert replay.insert(batch([2, 3]), 0.0)
    assert kept(replay) == [2, 3]
    assert replay.insert(batch([7], stream=2, first=0), 0.0)
    assert kept(replay) == [2, 3, 7]


def test_a_limiter_keeps_inserts_and_samples_within_its_buffer() -> None:
    blocked = 0
    for seed in range(_SEEDS):
        rng = random.Random(seed)
        ratio, min_size = rng.choice([0.5, 1.0, 2.5]), rng.randint(1, 10)
        buffer = 2 * max(1.0, ratio) + rng.randint(0, 5)
        replay = table(samples_per_insert=ratio, min_size=min_size, error_buffer=buffer)
        largest = int(replay.limiter.largest_sample)
        inserted = 0
        for _ in range(300):
            size = len(replay)
            ahead = inserted * ratio - replay.limiter.samples
            if rng.random() < 0.5:
                was = replay.insert(batch([inserted]), 0.0)
                assert was == (size < min_size or ahead + ratio <= ratio * min_size + buffer)
                inserted += was
                if not was:  # then the largest batch can come
                    assert replay.sample(largest, 0.0) is not None
                    blocked += 1
            else:
                count = rng.randint(1, largest)
                found = replay.sample(count, 0.0)
                assert (found is not None) == (
                    size >= min_size and ahead - count >= ratio * min_size - buffer
                )
    assert blocked > _SEEDS


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_inserts_and_samples_never_both_wait(seed: int) -> None:
    rng = random.Random(seed)
    ratio = rng.choice([0.5, 1.0, 3.0, 8.0])
    rules = Table(
        max_size=rng.randint(1, 20),
        sampler=rng.choice(["uniform", "prioritized", "fifo", "lifo"]),
        remover=rng.choice(["uniform", "prioritized", "fifo", "lifo"]),
        max_times_sampled=rng.choice([0, 8, 9]),
        samples_per_insert=ratio,
        error_buffer=2 * max(1.0, ratio) + rng.randint(0, 20),
    )
    replay, key = ReplayTable(rules, seed), 0
    count = int(min(replay.limiter.largest_sample, rng.randint(1, 30)))
    for _ in range(500):
        is_sampled = rng.random() < 0.5 and replay.sample(count, 0.0) is not None
        if not is_sampled:
            if not replay.insert(batch([key]), 0.0):
                assert replay.sample(count, 0.0) is not None
            else:
                key += 1


def test_a_limiter_lets_a_part_of_a_batch_in_and_the_rest_later() -> None:
    replay = table(samples_per_insert=1.0, error_buffer=4)
    assert not replay.insert(batch(range(8)), 0.0)
    assert kept(replay) == [0, 1, 2, 3, 4]
    sampled(replay, 3)
    assert replay.insert(batch(range(8)), 0.0)
    assert kept(replay) == list(range(8))


def test_who_waits_is_told_why_with_numbers() -> None:
    replay = table(samples_per_insert=2.0, min_size=2, error_buffer=6, max_times_sampled=4)
    why = replay.why
    assert (
        why("sample", 1, 0.0)
        == "table 'main': sample waits: min_size=2 items wanted, 0 so far; nobody inserts yet"
    )
    replay.insert(batch(range(9)), 5.0)
    assert len(replay) == 5
    assert (
        why("insert", 4, 45.0)
        == "table 'main': insert waits: 2.0 samples per insert wanted, 0.0 so far; nobody samples yet"
    )
    sampled(replay, 8)
    assert "2.0 samples per insert wanted, 2.0 so far; nobody samples since 40 s" in why(
        "insert", 4, 40.0
    )
    assert why("sample", 7, 45.0).endswith(
        "2.0 samples per insert wanted, 2.0 so far; 7 samples wanted, 4 allowed now; nobody inserts since 40 s"
    )
    with pytest.raises(
        ValueError, match=r"a batch of 11 never comes: .* 8 samples at once at most"
    ):
        replay.sample(11, 0.0)


def test_items_share_steps_which_are_freed_with_the_last_item() -> None:
    replay = table(max_size=2)
    replay.insert(batch([0, 1], steps_of=[[0, 1, 2], [1, 2, 3]], sent=[0, 1, 2, 3]), 0.0)
    assert replay.steps == 4
    found = sampled(replay, 5)
    assert (found.steps[0] == found.keys[:, None] + np.arange(3)).all()
    replay.insert(batch([2], steps_of=[[2, 3, 4]], sent=[4]), 0.0)  # item 0 goes
    assert (len(replay), replay.steps) == (2, 4)
    with pytest.raises(MissingStepsError):
        replay.insert(batch([3], steps_of=[[0, 1, 2]], sent=[]), 0.0)
    replay.insert(batch([3], steps_of=[[7, 8, 9]], sent=[7, 8, 9, 10]), 0.0)  # nobody wants 10
    assert (len(replay), replay.steps) == (2, 6)
    found = sampled(replay, 20)
    first = np.where(found.keys == 2, 2, 7)
    assert (found.steps[0] == first[:, None] + np.arange(3)).all()


def test_rows_that_are_being_saved_stay_while_others_come() -> None:
    replay = table(max_size=4)
    replay.insert(batch(range(4), steps_of=[[n, n + 1] for n in range(4)], sent=range(5)), 0.0)
    state = replay.state()
    replay.insert(
        batch(range(4, 9), steps_of=[[n, n + 1] for n in range(4, 9)], sent=range(4, 10)), 0.0
    )
    assert state.items.own[0][state.own_rows].tolist() == [0, 1, 2, 3]
    assert state.items.steps[0][state.step_rows].tolist() == [0, 1, 2, 3, 4]
    replay.let_go()
    assert sorted(set(sampled(replay, 50).keys.tolist())) == [5, 6, 7, 8]


def test_any_order_of_inserts_and_removals_keeps_items_with_their_steps() -> None:
    for seed in range(_SEEDS):
        rng = random.Random(seed)
        kinds, size = ["uniform", "prioritized", "fifo", "lifo"], rng.randint(1, 12)
        replay = table(
            max_size=size,
            sampler=rng.choice(kinds),
            remover=rng.choice(kinds),
            max_times_sampled=rng.choice([0, 1, 3]),
        )
        number = 0
        for _ in range(40):
            count = rng.randint(1, 6)
            keys = range(number, number + count)
            steps_of = [[key, key + 1, key + 2] for key in keys]
            sent = range(number, number + count + 2)
            weights = [rng.choice([0.0, 1.0, 3.0]) for _ in keys]
            assert replay.insert(batch(keys, weights, steps_of=steps_of, sent=sent), 0.0)
            number += count
            found = replay.sample(rng.randint(1, min(5, size)), 0.0) if rng.random() < 0.5 else None
            if found is not None:
                assert (found.steps[0] == found.keys[:, None] + np.arange(3)).all()
                replay.update_priorities(found.keys, np.full(len(found.keys), rng.random()))
            alive = kept(replay)
            assert len(alive) == len(replay) <= size
            assert replay.steps == len({key + n for key in alive for n in range(3)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 0}, "max_size is at least 1, not 0"),
        ({"min_size": 11}, "min_size is at most max_size=10, not 11"),
        ({"sampler": "best"}, r"sampler is one of .*'uniform'.*, not 'best'"),
        ({"remover": "best"}, "remover is one of"),
        ({"max_times_sampled": -1}, "max_times_sampled is at least 0"),
        ({"samples_per_insert": 0.0}, "samples_per_insert is finite and above 0"),
        ({"samples_per_insert": 4.0, "error_buffer": 7.0}, "error_buffer is at least 8: all could wait"),
        ({"samples_per_insert": 4.0, "max_times_sampled": 3}, "0 or at least samples_per_insert=4"),
        ({"priority_exponent": -1.0}, "priority_exponent is finite and at least 0"),
    ],
)  # fmt: skip
def test_a_table_that_could_never_work_is_refused_when_it_is_described(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Table(**{"max_size": 10, **options})


def test_a_node_takes_tables_with_different_names() -> None:
    for tables in ([], [Table(max_size=1), Table(max_size=2)]):
        with pytest.raises(ValueError, match="tables with different names"):
            rollouts.ReplayNode(tables)


class _FullNode:
    """A replay buffer in which each insert has to wait; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, SentItems]] = []

    def insert_now(self, _: str, items: SentItems) -> bool:
        self.calls.append(("insert_now", items))
        return False

    def insert(self, _: object, items: SentItems) -> str:
        self.calls.append(("insert", items))
        return ""


def test_inserts_that_have_to_wait_rarely_travel_twice() -> None:
    node = _FullNode()
    replay = rollouts.ReplayClient(node, ["main"])
    for _ in range(100):
        replay.insert(1.0)
    made = collections.Counter(name for name, _ in node.calls)
    assert made["insert"] == 100
    assert 1 <= made["insert_now"] <= 10


def test_priorities_of_writers_travel_as_plain_numbers() -> None:
    node = _FullNode()
    rows = rollouts.ReplayClient(node, ["main"]).sequence_writer(1)
    rows.append(1.0, priority=np.float32(2.0))  # of a package that the node may not have
    _, sent = node.calls[-1]
    assert [type(each) for each in sent.priorities] == [float]


# Programs.


def run(work: Callable[..., object], *tables: Table, **options: Any) -> None:
    """Runs a function with a replay buffer."""
    program = lp.Program("replay")
    replay = program.add_node(rollouts.ReplayNode(tables), label="replay")
    program.add_node(lp.PyNode(work, replay), label="work")
    lp.launch(program, "local_mt", **options).wait()


def test_items_are_nests_and_another_structure_is_refused_with_its_place() -> None:
    def work(replay: rollouts.ReplayClient) -> None:
        replay.insert({"b": (np.zeros(3, np.uint8), 1.5), "a": True})
        replay.insert_many({"a": np.ones(4, bool), "b": (np.ones((4, 3), np.uint8), np.ones(4))})
        found = replay.sample(6)
        assert found.items["b"][0].shape == (6, 3)
        assert [found.items["a"].dtype, found.items["b"][0].dtype] == [np.bool_, np.uint8]
        assert pickle.loads(pickle.dumps(replay)).info()["main"].size == 5
        wrong = [
            ({"a": True, "b": (np.zeros(4, np.uint8), 1.5)}, r"item\['b'\]\[0\] is uint8 of shape \(4,\), and was .*\(3,\)"),
            ({"b": (np.zeros(3, np.uint8), 1.5)}, r"item\['a'\] is missing"),
            ({"a": object()}, r"item\['a'\] cannot be kept"),
            ({}, "item has no arrays"),
        ]  # fmt: skip
        for item, message in wrong:
            with pytest.raises(rollouts.ItemError, match=message):
                replay.insert(item)
        with pytest.raises(rollouts.ItemError, match="equally many"):
            replay.insert_many({"a": np.ones(4), "b": np.ones(3)})
        with pytest.raises(
            rollouts.ItemError, match=r"item\['a'\]\[0\] is no array with the items"
        ):
            replay.insert_many({"a": [1, 2]})
        for wrong in (1e300, -1.0):
            with pytest.raises(ValueError, match="a priority is at least 0"):
                replay.insert(1, wrong, table="strings")
        replay.insert_many(np.array(["bb", "a"]), table="strings")
        with pytest.raises(rollouts.ItemError, match=r"item is <U8 of shape .*, and was <U2"):
            replay.insert_many(np.array(["x", "yyyyyyyy"]), table="strings")
        with pytest.raises(
            rollouts.UnknownTableError, match="'other'; there are 'main', 'strings'"
        ):
            replay.sample(1, table="other")
        with pytest.raises(ValueError, match="shape"):
            replay.update_priorities([1, 2], [1.0])

    run(work, Table(max_size=10), Table("strings", max_size=10, sampler="prioritized"))


def test_n_step_items_have_discounted_rewards_and_share_observations() -> None:
    def work(replay: rollouts.ReplayClient) -> None:
        writer = replay.n_step_writer(3, discount=0.5, batch_size=4)
        for terminated in (True, False):
            for step in range(6):
                writer.append({"x": np.full(2, step)}, step, 1.0)
            writer.end_episode({"x": np.full(2, 6)}, terminated=terminated)
        info = replay.info()["main"]
        assert (info.size, info.steps) == (12, 14)
        items = replay.sample(12).items
        assert items["action"].tolist() == [0, 1, 2, 3, 4, 5] * 2
        assert items["observation"]["x"][:, 1].tolist() == [0, 1, 2, 3, 4, 5] * 2
        assert items["next_observation"]["x"][:, 1].tolist() == [3, 4, 5, 6, 6, 6] * 2
        assert items["reward"].tolist() == [1.75, 1.75, 1.75, 1.75, 1.5, 1.0] * 2
        ended, cut_off = [0.125] * 3 + [0.0] * 3, [0.125] * 4 + [0.25, 0.5]
        assert items["discount"].tolist() == ended + cut_off

    run(work, Table(max_size=100, sampler="fifo", max_times_sampled=1))


def test_what_found_no_room_in_time_does_not_mix_episodes() -> None:
    def work(replay: rollouts.ReplayClient) -> None:
        writer = replay.n_step_writer(2, timeout_s=0.05)
        rows = replay.sequence_writer(2, period=1, table="rows", timeout_s=0.05)
        late = 0
        for episode in (100, 200):
            for step in range(episode, episode + 8):
                for write in (
                    lambda at=step: writer.append(at, 0, 1.0),
                    lambda at=step: rows.append(at),
                ):
                    try:
                        write()
                    except rollouts.ReplayTimeoutError:
                        late += 1
            for end in (lambda at=episode + 8: writer.end_episode(at), rows.end_episode):
                try:
                    end()
                except rollouts.ReplayTimeoutError:
                    late += 1
            replay.sample(4)
            replay.sample(4, table="rows")
        assert late
        for name in ("main", "rows"):
            size = replay.info()[name].size
            items = replay.sample(min(4, size), table=name).items if size else None
            if items is not None and name == "main":
                steps = items["next_observation"] - items["observation"]
                assert set(steps.tolist()) <= {1, 2}
            elif items is not None:
                assert (np.diff(items, axis=1) == 1).all()

    queue = {"max_size": 100, "sampler": "fifo", "max_times_sampled": 1, "samples_per_insert": 1.0}
    run(work, Table("main", error_buffer=5.0, **queue), Table("rows", error_buffer=5.0, **queue))


def test_sequences_share_steps_and_the_last_one_ends_with_the_episode() -> None:
    def work(replay: rollouts.ReplayClient) -> None:
        writer = replay.sequence_writer(4, period=3)
        for length in (9, 3, 7):
            for step in range(length):
                writer.append({"x": np.array([length, step])})
            writer.end_episode()
        assert replay.info()["main"].steps == 9 + 7
        found = replay.sample(5).items["x"]
        assert found[:, 0].tolist() == [[9, 0], [9, 3], [9, 5], [7, 0], [7, 3]]
        assert (np.diff(found[:, :, 1]) == 1).all()
        # All are gone, and their steps: they are sent again for the next item.
        for step in range(7):
            writer.append({"x": np.array([1, step])})
            if step >= 3 and step % 3 == 0:
                assert replay.sample(1).items["x"][0, :, 1].tolist() == [*range(step - 3, step + 1)]
        with pytest.raises(rollouts.ItemError, match=r"item\['x'\] is .*\(3,\), and was"):
            writer.append({"x": np.zeros(3, int)})

    run(work, Table(max_size=100, sampler="fifo", max_times_sampled=1))


def test_a_deadline_names_the_limiter_and_info_says_who_waits() -> None:
    def work(replay: rollouts.ReplayClient) -> None:
        with pytest.raises(
            TimeoutError,
            match=r"sample waits: min_size=1 items wanted, 0 so far; nobody inserts yet",
        ):
            replay.sample(1, timeout_s=0.05)
        for item in range(5):
            replay.insert(item)
        with pytest.raises(
            rollouts.ReplayTimeoutError,
            match=r"insert waits: 1.0 samples per insert wanted, 0.0 so far",
        ):
            replay.insert(5, timeout_s=0.05)
        waiting = threading.Thread(target=replay.insert, args=(6,))
        waiting.start()
        poll_until(lambda: replay.info()["main"].waits)
        assert re.match(
            r"work\[0\] waits 0 s: table 'main': insert waits", replay.info()["main"].waits[0]
        )
        replay.sample(2)
        waiting.join()
        assert replay.info()["main"].waits == []
        assert replay.info()["main"].inserts == 6

    run(work, Table(max_size=10, samples_per_insert=1.0, error_buffer=4))


def test_samples_come_ahead_and_end_with_the_program() -> None:
    def work(replay: rollouts.ReplayClient) -> None:
        replay.insert_many(np.arange(100))
        for number, found in enumerate(replay.samples(10, ahead=2)):
            assert found.table_size == 100
            if number == 0:
                poll_until(lambda: replay.info()["main"].samples == 30)
                lp.stop()
        assert replay.info()["main"].samples <= 30 + 10 * number

    run(work, Table(max_size=100))


def _act(replay: rollouts.ReplayClient, actor: int) -> None:
    for step in range(0, 300, 3):
        keys = actor * 1000 + np.arange(step, step + 3)
        replay.insert_many({"key": keys, "frame": np.repeat(keys[:, None], 100, axis=1)})


def _learn(replay: rollouts.ReplayClient, actors: int) -> None:
    seen: collections.Counter[int] = collections.Counter()
    for found in replay.samples(20):
        assert (found.items["frame"] == found.items["key"][:, None]).all()
        seen.update(found.items["key"].tolist())
        if seen.total() == actors * 300:
            break
    assert set(seen.values()) == {1}


def test_actors_in_processes_fill_a_queue_which_loses_and_doubles_nothing(
    launch_program: ProgramLauncher,
) -> None:
    program = lp.Program("queue")
    queue = Table(
        max_size=61, sampler="fifo", max_times_sampled=1, samples_per_insert=1.0, error_buffer=60
    )
    replay = program.add_node(rollouts.ReplayNode([queue]), label="replay")
    with program.group("actor"):
        for actor in range(2):
            program.add_node(lp.PyNode(_act, replay, actor))
    program.add_node(lp.PyNode(_learn, replay, 2), label="learner")
    launch_program(program, "test_mp").wait()


def test_checkpoints_keep_items_steps_and_counters(tmp_path: Path) -> None:
    tables = [
        Table("plain", max_size=10, sampler="prioritized", max_times_sampled=5),
        Table("steps", max_size=10),
        Table("empty", max_size=10),
    ]

    def fill(replay: rollouts.ReplayClient) -> None:
        replay.insert_many({"x": np.arange(12)}, np.arange(12), table="plain")
        replay.sample(4, table="plain")  # too few for one item to go
        writer = replay.sequence_writer(3, table="steps")
        for step in range(6):
            writer.append((step, np.full(2, step)))
        infos.append(replay.info())

    def check(replay: rollouts.ReplayClient) -> None:
        infos.append(replay.info())
        found = replay.sample(40, table="plain")
        assert (found.priorities >= 2).all()
        assert (found.items["x"] == found.priorities).all()
        numbers, frames = replay.sample(20, table="steps").items
        assert (frames == numbers[..., None]).all()
        assert (np.diff(numbers) == 1).all()
        replay.insert({"x": 5}, table="plain")

    infos: list[Any] = []
    for work in (fill, check):
        run(work, *tables, checkpoints={"replay": lp.Checkpoints(tmp_path)})
    assert infos[0] == infos[1]
    assert [each.size for each in infos[0].values()] == [10, 4, 0]
    assert infos[0]["steps"].steps == 6


def _write(replay: rollouts.ReplayClient) -> None:
    writer = replay.sequence_writer(4)
    for step in itertools.count():
        writer.append(step)
        if lp.wait_for_stop(0):
            return


def _read(replay: rollouts.ReplayClient, path: Path) -> None:
    for found in replay.samples(8):
        assert (np.diff(found.items, axis=1) == 1).all()
        path.write_text(str(found.items.max()))
        if found.items.max() > 300:
            lp.stop()


@pytest.mark.slow
def test_actors_and_learners_go_on_when_the_buffer_was_killed(
    launch_program: ProgramLauncher, tmp_path: Path
) -> None:
    program = lp.Program("killed")
    table = Table(max_size=50, samples_per_insert=8.0, error_buffer=32)
    replay = program.add_node(rollouts.ReplayNode([table]), label="replay")
    program.add_node(lp.PyNode(_write, replay), label="actor")
    program.add_node(lp.PyNode(_read, replay, tmp_path / "seen"), label="learner")
    running = launch_program(program, "test_mp", restart={"replay": "on_failure"})
    poll_until((tmp_path / "seen").exists)
    (pid,) = (each.pid for each in running.running.status() if each.name == "replay[0]")
    assert int((tmp_path / "seen").read_text() or 0) < 300
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert running.wait().restarts
