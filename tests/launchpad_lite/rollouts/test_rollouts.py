"""Programs with generators and a trainer."""

import collections
import concurrent.futures
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import courier
import launchpad_lite as lp
from courier import lowlevel
from launchpad_lite import replicas, rollouts
from launchpad_lite.rollouts import _buffer_node
from launchpad_lite.rollouts._generating import LEASE, serve_environment
from launchpad_lite.testing import poll_until
from launchpad_lite.testing.programs import ProgramLauncher, call_until_answered


class Generator:
    """Tells the weights that it sees."""

    def generate(self, prompt: int, weights: Any) -> tuple[int, float, float]:
        return prompt, float(weights["w"].min()), float(weights["w"].max())


class Awkward(Generator):
    """Fails or waits at some prompts."""

    def __init__(self, does: Callable[[int], object]) -> None:
        self._does = does

    def generate(self, prompt: int, weights: Any) -> Any:
        self._does(prompt)
        return super().generate(prompt, weights)


def params(version: int) -> dict[str, Any]:
    return {"w": np.full(100_000, float(version))}


def train(made: rollouts.RolloutsClient, groups: int, told: list[Any], **options: Any) -> None:
    """Trains to the end, or to an error, with weights that are their version."""
    version = made.publish(params(1))
    try:
        for batch in made.batches(groups, **options):
            told.append((batch, made.state()))
            version = made.publish(params(version + 1))
    except (rollouts.RolloutsError, ValueError) as error:
        told.append(error)
    told.append(made.status())


def program(
    described: rollouts.Rollouts,
    generator: Any = Generator,
    *,
    groups: int = 2,
    generators: int = 2,
    train: Any = train,
    watch: Any = None,
    **options: Any,
) -> tuple[lp.Program, list[Any]]:
    whole = lp.Program("rollouts")
    handle = described.add_to(whole, generator=generator, generators=generators)
    told: list[Any] = []
    whole.add_node(lp.PyNode(train, handle, groups, told, **options), label="trainer")
    if watch is not None:
        whole.add_node(lp.PyNode(watch, handle), label="watch")
    return whole, told


def run(described: rollouts.Rollouts, *args: Any, **options: Any) -> list[Any]:
    """Runs a program with threads, and returns what its trainer told."""
    whole, told = program(described, *args, **options)
    lp.launch(whole, "local_mt").wait()
    return told


def trained(told: list[Any]) -> collections.Counter[int]:
    batches = [each[0] for each in told if isinstance(each, tuple)]
    return collections.Counter(group.index for batch in batches for group in batch)


def test_each_prompt_gets_its_group_once_in_each_epoch_with_fresh_weights() -> None:
    told = run(
        rollouts.Rollouts(list(range(11)), group_size=3, max_staleness=1, epochs=2), groups=4
    )
    assert trained(told) == dict.fromkeys(range(11), 2)
    batches = [each[0] for each in told[:-1]]
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 2]
    for batch in batches:
        for group in batch:
            assert group.staleness <= 1
            assert group.prompt == group.index
            assert len(group.rollouts) == 3
            for each in group.rollouts:
                # Whole weights of one version, and of the newest steps.
                assert each.value == (group.prompt, each.version, each.version)
                assert each.version >= batch.step  # of step s, the newest version is s + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"group_size": 0}, "group_size is at least 1, not 0"),
        ({"group_size": 4, "min_group_size": 5}, "min_group_size is at most 4, not 5"),
        ({"max_staleness": -1}, "max_staleness is at least 0, not -1"),
        ({"when_stale": "drop"}, "when_stale is 'pace' or 'discard', not 'drop'"),
        ({"epochs": 0}, "epochs is at least 1, not 0"),
        ({"rollout_timeout_s": 0}, "rollout_timeout_s is above 0, not 0"),
        ({"environment_timeout_s": 0}, "environment_timeout_s is above 0, not 0"),
        ({"reward_timeout_s": -1}, "reward_timeout_s is above 0, not -1"),
        ({"max_attempts": 0}, "max_attempts is at least 1, not 0"),
        ({"absence_s": -1}, "absence_s is above 0, not -1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Rollouts: {re.escape(message)}$"):
        rollouts.Rollouts(**{"prompts": [1], **options})
    with pytest.raises(TypeError, match=r"group_size is a whole number, not 2\.5"):
        rollouts.Rollouts([1], group_size=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"prompts is a sequence, such as a list, not \{1\}"):
        rollouts.Rollouts({1})  # type: ignore[arg-type]


def test_a_generator_needs_its_method_and_a_trainer_weights() -> None:
    with pytest.raises(TypeError, match=r"has no generate\(prompt, weights\)"):
        program(rollouts.Rollouts([1]), object)

    def read(made: rollouts.RolloutsClient, groups: int, told: list[Any]) -> None:
        for count in (0, groups):
            try:
                made.batches(count)
            except (rollouts.RolloutsError, ValueError) as error:
                told.append(str(error))

    assert run(rollouts.Rollouts([1]), train=read) == [
        "batches: groups is at least 1, not 0",
        "publish the first weights before batches(): generators wait for them",
    ]


def test_threads_of_one_generator_make_rollouts_at_the_same_time() -> None:
    meet = threading.Barrier(3, timeout=10)
    whole = lp.Program("rollouts")
    handle = rollouts.Rollouts(list(range(6)), max_staleness=2).add_to(
        whole, generator=lp.Deferred(Awkward, lambda _: meet.wait()), generators=1, threads=3
    )
    told: list[Any] = []
    whole.add_node(lp.PyNode(train, handle, 1, told), label="trainer")
    lp.launch(whole, "local_mt").wait()
    assert trained(told) == dict.fromkeys(range(6), 1)


# Nothing hangs


def test_a_trainer_that_waits_says_for_whom() -> None:
    blocks = threading.Event()
    wanted = (
        r"the trainer has waited \d+ s: prompt 3: 0 of 2; rollout 0 has been at generator\[\d\] for "
        r"\d+ s, which is at test_rollouts.py:\d+: .*blocks.wait.*; rollout 1 has been at .*, which .*"
    )

    def watch(made: rollouts.RolloutsClient) -> None:
        try:
            poll_until(lambda: re.fullmatch(wanted, made.status().waits))
        finally:
            blocks.set()

    whole, told = program(
        rollouts.Rollouts(list(range(8)), group_size=2, max_staleness=1, shuffle=False),
        lp.Deferred(Awkward, lambda prompt: prompt == 3 and blocks.wait()),
        watch=watch,
    )
    lp.launch(whole, "local_mt").wait()
    assert trained(told) == dict.fromkeys(range(8), 1)


def test_a_prompt_that_fails_is_set_aside_with_its_errors() -> None:
    def does(prompt: int) -> None:
        if prompt == 2:
            raise ArithmeticError("no reward")

    told = run(rollouts.Rollouts(list(range(6)), group_size=2), lp.Deferred(Awkward, does))
    assert trained(told) == {0: 1, 1: 1, 3: 1, 4: 1, 5: 1}
    (failed,) = [failed for batch, _ in told[:-1] for failed in batch.set_aside] or [None]
    assert failed is not None
    assert failed.index == 2
    assert "ArithmeticError: no reward" in failed.errors[-1]
    assert told[-1].set_aside == 1


class _Unreadable:
    """Cannot be pickled, or cannot be unpickled."""

    def __init__(self, is_sent: bool) -> None:
        self._is_sent = is_sent

    def __reduce__(self) -> Any:
        if not self._is_sent:
            raise ArithmeticError("not to be sent")
        return int, ("not to be read",)


class _SomeUnreadable:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return _Unreadable(index == 2) if index in (2, 4) else index


def test_a_prompt_that_cannot_be_sent_or_read_is_set_aside() -> None:
    errors: dict[int, str] = {}

    def read(made: rollouts.RolloutsClient, groups: int, told: list[Any]) -> None:
        made.publish(params(1))
        told += [group.prompt for batch in made.batches(groups) for group in batch]
        errors.update((each.index, each.errors[-1]) for each in made.set_aside)

    whole, told = program(rollouts.Rollouts(_SomeUnreadable(), absence_s=5), train=read)  # type: ignore[arg-type]
    lp.launch(whole, "local_mt").wait()
    assert sorted(told) == [0, 1, 3, 5]
    assert "ValueError: invalid literal for int()" in errors[2]
    assert "not to be sent" in errors[4]


def test_one_generator_that_fails_does_not_spoil_what_others_make() -> None:
    names = iter(range(3))

    class Some(Generator):
        def __init__(self) -> None:
            self._is_broken = next(names) == 0

        def generate(self, prompt: int, weights: Any) -> Any:
            if self._is_broken:
                raise ArithmeticError("broken")
            time.sleep(0.01)
            return super().generate(prompt, weights)

    told = run(rollouts.Rollouts(list(range(40))), Some, generators=3)
    assert trained(told) == dict.fromkeys(range(40), 1)
    assert told[-1].set_aside == 0


def test_prompts_that_are_set_aside_last_are_told_too() -> None:
    def does(prompt: int) -> None:
        if prompt == 5:
            raise ArithmeticError("no reward")

    left: list[int] = []

    def read(made: rollouts.RolloutsClient, groups: int, _: Any) -> None:
        made.publish(params(1))
        for _ in made.batches(groups):
            pass
        left.extend(failed.index for failed in made.set_aside)

    prompts = rollouts.Rollouts(list(range(6)), shuffle=False)
    run(prompts, lp.Deferred(Awkward, does), train=read, groups=5)
    assert left == [5]


def test_a_program_may_have_several() -> None:
    whole = lp.Program("rollouts")
    described = rollouts.Rollouts([1])
    for label in ("rollouts", "play"):
        described.add_to(whole, generator=Generator, generators=1, label=label)
    assert {*whole.groups} == {
        *("rollouts", "weights", "generator"),
        *("play", "play_weights", "play_generator"),
    }
    with pytest.raises(ValueError, match="the program has a group 'play'; give another label="):
        described.add_to(whole, generator=Generator, generators=1, label="play")


def test_a_generator_that_always_fails_ends_the_wait_with_its_error() -> None:
    def does(_: int) -> None:
        raise ArithmeticError("no reward")

    began_at = time.monotonic()
    told = run(rollouts.Rollouts(list(range(100))), lp.Deferred(Awkward, does))
    assert isinstance(told[0], rollouts.PromptsFailedError)
    assert "ArithmeticError: no reward" in str(told[0])
    assert time.monotonic() - began_at < 5


def test_generators_that_never_come_back_end_the_wait() -> None:
    ends = threading.Event()
    told = run(
        rollouts.Rollouts(list(range(4)), rollout_timeout_s=0.2, absence_s=0.3),
        lp.Deferred(Awkward, lambda _: ends.wait(8)),
        generators=1,
    )
    ends.set()
    assert isinstance(told[0], rollouts.GeneratorsGoneError)
    assert "no generator goes on: generator[0] all work" in str(told[0])


def test_a_group_goes_on_without_a_rollout_that_takes_too_long() -> None:
    slow = threading.Lock()
    ends = threading.Event()

    def does(prompt: int) -> None:
        if prompt == 0 and slow.acquire(blocking=False):
            ends.wait(8)

    told = run(
        rollouts.Rollouts(
            list(range(4)), group_size=3, min_group_size=2, rollout_timeout_s=0.5, shuffle=False
        ),
        lp.Deferred(Awkward, does),
    )
    ends.set()
    sizes = {group.index: len(group.rollouts) for batch, _ in told[:-1] for group in batch}
    assert sizes == {0: 2, 1: 3, 2: 3, 3: 3}


# Ends and beginnings


def test_a_trainer_goes_on_from_a_state_with_the_prompts_that_it_has_not_trained() -> None:
    described = rollouts.Rollouts(list(range(10)), max_staleness=2, epochs=2)
    before = run(described)[:3]
    after = run(described, state=before[-1][1])
    assert trained(before) + trained(after) == dict.fromkeys(range(10), 2)
    told = run(rollouts.Rollouts([1, 2, 3]), state=before[-1][1])
    assert str(told[0]) == "the state is of 10 prompts, seed 0; these are 3 prompts, seed 0"


class Slow(Generator):
    """Takes a moment for each rollout."""

    def generate(self, prompt: int, weights: Any) -> Any:
        time.sleep(0.01)
        return super().generate(prompt, weights)


def _train_to_file(made: rollouts.RolloutsClient, groups: int, _: Any, path: Path) -> None:
    told: list[Any] = []
    train(made, groups, told)
    errors = [str(each) for each in told if isinstance(each, Exception)]
    path.write_text(json.dumps([told[-1].step, dict(trained(told)), errors]))


@pytest.mark.slow
def test_nothing_is_lost_or_trained_twice_when_nodes_are_killed(
    launch_program: ProgramLauncher, tmp_path: Path
) -> None:
    whole, _ = program(
        rollouts.Rollouts(list(range(60)), group_size=2, max_staleness=2, max_losses=100),
        Slow,
        train=_train_to_file,
        path=tmp_path / "told",
    )
    restart = dict.fromkeys(("rollouts", "weights"), "on_failure")
    running = launch_program(whole, "test_mp", restart=restart)
    buffer = running.client("rollouts")
    for number, victim in enumerate(("generator", *restart)):
        poll_until(lambda least=5 * number + 3: call_until_answered(buffer.status).step >= least)
        (pid,) = (each.pid for each in running.running.status() if each.name == f"{victim}[0]")
        os.kill(pid, signal.SIGKILL)
    running.wait()
    step, counts, errors = json.loads((tmp_path / "told").read_text())
    assert not errors
    assert counts == {str(index): 1 for index in range(60)}
    assert step == 30


# Environments and rewards


class Counting:
    """Counts up to a prompt; hangs once at a prompt, and dies once at another one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def reset(self, prompt: int) -> int:
        self._count = 0
        if prompt in (3, 7):
            path = self._folder / f"was at {prompt}"
            if not path.exists():
                path.touch()
                if prompt == 7:
                    os._exit(1)
                time.sleep(60)
        return os.getpid()

    def run(self, steps: int) -> None:
        self._count += steps

    def step(self) -> int:
        self._count += 1
        return self._count


class Walker:
    def generate(self, prompt: int, weights: Any, environment: Any) -> tuple[int, int]:
        pid = environment.reset(prompt)
        environment.run(prompt)
        return environment.step() - 1, pid


class Judge:
    """Hangs once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "was judged"

    def reward(self, prompt: int, rollout: tuple[int, int]) -> float:
        if prompt == 5 and not self._path.exists():
            self._path.touch()
            time.sleep(60)
        return float(rollout[0] == prompt)


def test_a_rollout_has_an_environment_for_itself_and_gets_a_reward(tmp_path: Path) -> None:
    for number in (3, 5, 7):
        (tmp_path / f"was at {number}").touch()
    (tmp_path / "was judged").touch()
    whole = lp.Program("rollouts")
    handle = rollouts.Rollouts(list(range(12)), group_size=2).add_to(
        whole,
        generator=Walker,
        generators=1,
        threads=4,
        environment=lp.Deferred(Counting, tmp_path),
        environments=2,
        reward=lp.Deferred(Judge, tmp_path),
    )
    told: list[Any] = []
    whole.add_node(lp.PyNode(train, handle, 2, told), label="trainer")
    lp.launch(whole, "local_mt").wait()
    assert trained(told) == dict.fromkeys(range(12), 1)
    for batch, _ in told[:-1]:
        for group in batch:
            assert group.rewards == [1.0, 1.0]
            assert [count for count, _ in group.values] == [group.prompt] * 2


def test_a_reward_needs_its_method() -> None:
    described = rollouts.Rollouts([1])
    with pytest.raises(TypeError, match=r"Generator.* has no reward\(prompt, rollout\)"):
        described.add_to(
            lp.Program("rollouts"), generator=Generator, generators=1, reward=Generator
        )


# Replicated trainers


def _train_together(repl: Any, made: rollouts.RolloutsClient, told: list[Any]) -> None:
    if repl.replica_id == 0:
        made.publish(params(1))
    for batch in made.batches(3, replicator=repl):
        told.append((repl.replica_id, batch.step, [group.index for group in batch], made.state()))
        if repl.replica_id == 0:
            made.publish(params(batch.step + 2))


def test_replicas_of_a_trainer_get_the_parts_of_each_batch() -> None:
    whole = lp.Program("rollouts")
    handle = rollouts.Rollouts(list(range(12))).add_to(whole, generator=Generator, generators=1)
    told: list[Any] = []
    replicas.MultiWorkerReplicator(2).add_to(whole, _train_together, handle, told)
    lp.launch(whole, "local_mt").wait()
    for step in range(4):
        (_, _, first, state), (_, _, second, same) = sorted(
            (each for each in told if each[1] == step), key=lambda each: each[0]
        )
        assert (len(first), len(second)) == (2, 1)
        assert state == same
    assert sorted(index for _, _, part, _ in told for index in part) == list(range(12))


# From outside


class Named(Slow):
    def generate(self, prompt: int, weights: Any) -> Any:
        return lp.current_node().label, super().generate(prompt, weights)


def test_generators_join_from_outside_and_leave(tmp_path: Path) -> None:
    whole = lp.Program("rollouts")
    handle = rollouts.Rollouts(list(range(2000)), max_staleness=2).add_to(
        whole, generator=Named, generators=1, folder=tmp_path / "run"
    )
    told: list[Any] = []
    whole.add_node(lp.PyNode(train, handle, 2, told), label="trainer")
    with pytest.raises(rollouts.RolloutsError, match="a program with rollouts writes join"):
        rollouts.join(tmp_path / "run" / "join.json")
    running = lp.launch(whole, "local_mt")
    path = tmp_path / "run" / "join.json"
    poll_until(path.exists)
    joined = lp.launch(rollouts.join(path, generators=2), "local_mt")

    def makers() -> set[str]:
        batches = [each[0] for each in told]
        return {group.values[0][0] for batch in batches[-20:] for group in batch}

    poll_until(lambda: len(makers()) == 2)
    joined.request_stop("it is enough")
    joined.wait()
    running.request_stop("it is enough")
    running.wait()
    assert not path.exists()


class Writer:
    """Writes up to a number, in parts, and says which weights it sees."""

    def generate(self, prompt: int, weights: Any, parts: list[Any]) -> Any:
        for number in range(len(parts), prompt):
            time.sleep(0.002)
            yield number, float(weights["w"][0])


def test_a_rollout_in_parts_goes_on_with_newer_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    monkeypatch.setattr(_buffer_node, "_TICK_S", 0.01)
    monkeypatch.setattr(_buffer_node.lp, "log", lambda rates, step: lines.append((*rates, step)))
    told = run(
        rollouts.Rollouts(
            [2, *[40] * 3, *[1] * 20], max_staleness=8, partial=True, shuffle=False, size_of=len
        ),
        Writer,
        groups=1,
    )
    assert told[-1].size_per_s > 2 * told[-1].rollouts_per_s > 0
    assert lines
    assert {*lines[-1][:-1]} <= {"rollouts_per_s", "size_per_s", "steps_per_s"}
    assert trained(told) == dict.fromkeys(range(24), 1)
    groups = [group for batch, _ in told[:-1] for group in batch]
    for group in groups:
        (rollout,) = group.rollouts
        assert rollout.value == list(zip(range(group.prompt), rollout.versions, strict=True))
        assert list(rollout.versions) == sorted(rollout.versions)
        assert rollout.version == rollout.versions[0]
    assert any(len(set(group.rollouts[0].versions)) > 1 for group in groups)
    with pytest.raises(TypeError, match=r"partial=True: .*generate.* does not yield parts"):
        program(rollouts.Rollouts([1], partial=True))


@pytest.mark.slow
def test_environments_and_rewards_that_hang_or_die_start_again(
    launch_program: ProgramLauncher, tmp_path: Path
) -> None:
    whole = lp.Program("rollouts")
    handle = rollouts.Rollouts(
        list(range(12)), group_size=2, environment_timeout_s=1.0, reward_timeout_s=1.0
    ).add_to(
        whole,
        generator=Walker,
        generators=2,
        environment=lp.Deferred(Counting, tmp_path),
        reward=lp.Deferred(Judge, tmp_path),
    )
    node = lp.PyNode(_train_to_file, handle, 2, None, tmp_path / "told")
    whole.add_node(node, label="trainer")
    running = launch_program(whole, "test_mp")
    result = running.wait()
    step, counts, errors = json.loads((tmp_path / "told").read_text())
    assert not errors
    assert counts == {str(index): 1 for index in range(12)}
    assert step == 6
    again = sorted(each.node.partition("[")[0] for each in result.restarts)
    assert again == ["environment", "environment", "reward"]


class LateBuffer:
    """A buffer that hears from an environment late."""

    def __init__(self) -> None:
        self._hears = threading.Event()

    def beat(self, *_: Any) -> bool:
        return not self._hears.wait(20)

    def hear(self) -> None:
        self._hears.set()


def test_an_environment_takes_no_call_before_the_buffer_knows_of_its_life(tmp_path: Path) -> None:
    whole = lp.Program("environments")
    buffer = whole.add_node(lp.CourierNode(LateBuffer), label="rollouts")
    node = lp.CourierNode(serve_environment, buffer, (Counting, (tmp_path,), {}))
    node.disable_run()
    environment = whole.add_node(node, label="environment")

    def call(buffer: Any, environment: Any) -> None:
        early = environment.futures.reset(1)
        with pytest.raises(concurrent.futures.TimeoutError):
            early.result(0.3)
        buffer.hear()
        early.result(20)

    whole.add_node(lp.PyNode(call, buffer, environment), label="caller")
    lp.launch(whole, "test_mt").wait()


class EarlyBuffer:
    """A buffer that knows all."""

    def beat(self, member: Any, held: Any, threads: int) -> bool:
        if threads == 0:
            _HEARD.set()
        return False


_HEARD, _BEGUN, _MAY_END = threading.Event(), threading.Event(), threading.Event()


class Held:
    """An environment that is held up in a call."""

    def __init__(self) -> None:
        assert _HEARD.wait(20)  # before, the buffer knows that the last life is over

    def hold(self) -> None:
        _BEGUN.set()
        _MAY_END.wait(20)

    @courier.idempotent
    async def step(self, number: int) -> int:
        return number

    def __call__(self) -> str:
        return "called"


def test_an_environment_refuses_rollouts_whose_lease_is_over() -> None:
    whole = lp.Program("environments")
    buffer = whole.add_node(lp.CourierNode(EarlyBuffer), label="rollouts")
    node = lp.CourierNode(serve_environment, buffer, (Held, (), {}))
    node.disable_run()
    environment = whole.add_node(node, label="environment")

    def call(environment: Any) -> None:
        first, second = (
            lowlevel.with_arguments(environment, **{LEASE: number}) for number in (1, 2)
        )
        assert (first.step(1), courier.with_timeout(first, 20)()) == (1, "called")
        held = first.futures.hold()
        assert _BEGUN.wait(20)
        early = second.futures.step(2)
        with pytest.raises(concurrent.futures.TimeoutError):
            early.result(0.1)  # the call of the first one still runs
        _MAY_END.set()
        assert (held.result(20), early.result(20)) == (None, 2)
        with pytest.raises(
            rollouts.EnvironmentTakenError, match=r"environment\[0\]: lease 1 is over, and lease 2 "
        ):
            first.step(1)
        assert courier.list_methods(first) == ["__call__", "hold", "step"]

    whole.add_node(lp.PyNode(call, environment), label="caller")
    lp.launch(whole, "local_mt").wait()
