"""Rollouts of a reinforcement learner: generators make them, a trainer gets them in batches."""

import dataclasses
import inspect
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.parts.settings import check_number
from launchpad_lite.rollouts._buffer import (
    ENVIRONMENT,
    GENERATOR,
    REWARD,
    BufferRules,
    HandedBatch,
    PromptOrder,
)
from launchpad_lite.rollouts._buffer_node import BufferNode, UnknownSessionError
from launchpad_lite.rollouts._generating import (
    GeneratorNode,
    MadeFrom,
    ReturningNode,
    RewardNode,
    loaded,
    serve_environment,
)
from launchpad_lite.rollouts._patience import SILENT_S, Lateness, call_patiently
from launchpad_lite.rollouts.errors import RolloutsError
from launchpad_lite.rollouts.results import (
    FailedPrompt,
    RolloutBatch,
    RolloutGroup,
    RolloutState,
    RolloutStatus,
)
from launchpad_lite.rollouts.weights import Dtype, Weights, WeightsClient, WeightsHandle

#: Seconds for which a call waits for a batch.
_POLL_S = 1.0

_LOGGER = logging.getLogger(__name__)


class RolloutsClient:
    """The rollouts, seen from the trainer: what their handle becomes. For one trainer, and one thread.

    Attributes:
        weights: The weights that `publish` changes.
        set_aside: All prompts that were given up, since this object was made.

    Example:
        class Trainer:
            def __init__(self, made: rollouts.RolloutsClient):
                self._rollouts = made

            def run(self):
                self._rollouts.publish(self._params)
                for batch in self._rollouts.batches(groups=16):
                    for group in batch:
                        self.learn(group.prompt, group.values)
                    self._rollouts.publish(self._params)
    """

    def __init__(self, prompts: Sequence[Any], buffer: Any, weights: WeightsClient) -> None:
        """Makes one; the handle does that."""
        self._prompts = prompts
        self._buffer = courier.with_timeout(buffer, SILENT_S)
        self._hand_out = buffer.hand_out  # of any size
        self.weights = weights
        self._session = uuid.uuid4().hex
        self._groups = 0
        self._number = 0
        self._version = 0
        self._state: RolloutState | None = None
        self.set_aside: list[FailedPrompt] = []

    def publish(self, params: Any) -> int:
        """Gives new weights to generators, and returns their version; the last batch is trained.

        Rollouts that begin from now on are made with them, or with newer ones.

        Args:
            params: As for `WeightsClient.publish`.

        Raises:
            WeightsError: As `WeightsClient.publish`.
        """
        self._version = self.weights.publish(params)
        call_patiently(self._buffer.published, self._session, self._version)
        return self._version

    def batches(
        self, groups: int, *, state: RolloutState | None = None, replicator: Any = None
    ) -> Iterator[RolloutBatch[Any, Any]]:
        """Yields batches, until all prompts were used or this node is to stop.

        A batch counts as trained when the next one is asked for, or at the next `publish`. The last
        batch may have fewer groups.

        Args:
            groups: How many groups a batch has.
            state: What `state` has returned, of an earlier life of this trainer: rollouts go on from
                there. None: from where they are now.
            replicator: Of `replicas`, if the trainer is replicated, and all replicas call this together:
                each gets its part of the groups of each batch, which may be empty. Only replica 0 talks
                to the buffer, so only it may publish; all have the `state`.

        Raises:
            ValueError: The number is below 1, or the state is of other prompts or another order.
            TypeError: The number is none.
            RolloutsError: Nothing was published: generators have no weights.
            GeneratorsGoneError: While it is read: no batch can come.
            PromptsFailedError: While it is read: one prompt after another fails.
            TrainerReplacedError: While it is read: another trainer has begun.
        """
        check_number("batches: groups", groups, 1)
        if replicator is not None:
            return self._read_together(groups, state, replicator)
        if not self._version:
            raise RolloutsError(
                "publish the first weights before batches(): generators wait for them"
            )
        if state is not None:
            self._session = uuid.uuid4().hex
            self._state = state
        self._groups = groups
        self._begin(self._session)
        return self._read()

    def _read_together(
        self, groups: int, state: RolloutState | None, replicator: Any
    ) -> Iterator[RolloutBatch[Any, Any]]:
        rank, size = replicator.replica_id, replicator.num_replicas
        batches = self.batches(groups, state=state) if rank == 0 else None
        while True:
            batch = None if batches is None else next(batches, None)
            mine = batch, self._state
            batch, self._state = replicator.all_gather(mine, "a batch of rollouts")[0]
            if batch is None:
                return
            yield dataclasses.replace(batch, groups=batch.groups[rank::size])

    def _read(self) -> Iterator[RolloutBatch[Any, Any]]:
        session = self._session
        while (handed := self._next(session)) is not None:
            batch, state = handed
            self.set_aside += batch.set_aside
            for failed in batch.set_aside:
                _LOGGER.warning(
                    "prompt %d is set aside: %s", failed.index, failed.errors[-1].strip()
                )
            if not batch.groups:
                return
            self._state = state
            yield dataclasses.replace(batch, groups=[self._group(each) for each in batch.groups])

    def _group(self, group: RolloutGroup[Any, Any]) -> RolloutGroup[Any, Any]:
        made = [
            dataclasses.replace(each, value=loaded(each.value), reward=loaded(each.reward))
            for each in group.rollouts
        ]
        return dataclasses.replace(group, prompt=self._prompts[group.index], rollouts=made)

    def _next(self, session: str) -> HandedBatch | None:
        """Returns the next batch; None if this node is to stop."""
        self._number += 1
        stop, lateness = lp.stop_event(), Lateness(_LOGGER)
        while not stop.is_set():
            lp.heartbeat()  # a trainer that waits is not hung
            self.weights.keep()
            try:
                found = call_patiently(self._hand_out, session, self._number, _POLL_S)
            except UnknownSessionError:
                self._begin(session)
                continue
            if isinstance(found, tuple):
                return found
            lateness.warn(str(found))
        return None

    def _begin(self, session: str) -> None:
        begin = self._buffer.begin
        begun = call_patiently(begin, session, self._groups, self._version, self._state)
        self._state = begun or self._state

    def state(self) -> RolloutState | None:
        """Returns what `batches` takes to go on after the last batch; None before `batches`.

        Save it with the weights that this batch has changed: then each prompt counts once in the weights
        that come back. Rollouts that no batch has had yet are made again.
        """
        return self._state

    def status(self) -> RolloutStatus:
        """Returns how far all is, and who waits for whom."""
        status: RolloutStatus = self._buffer.status()
        return status


class RolloutsHandle(lp.Deferred[RolloutsClient]):
    """A handle of rollouts: becomes a `RolloutsClient` in the trainer.

    Attributes:
        weights: A handle of the weights alone, for other nodes.

    Example:
        made = rollouts.Rollouts(prompts).add_to(program, generator=Generator, generators=4)
        program.add_node(lp.PyClassNode(Trainer, made), label="trainer")
        program.add_node(lp.PyClassNode(Evaluator, made.weights), label="evaluator")
    """

    weights: WeightsHandle


class Rollouts:
    """Prompts, of which generators make groups of rollouts for a trainer.

    Generators work ahead of the trainer, within a bound: what is trained in step s was begun in
    step s - max_staleness or later. A step ends with the `publish` after a batch. Each prompt gets
    its rollouts once in an epoch, whatever generators are lost, slow or doubled. A trainer that
    waits says for whom, and gets an error where nothing can come.

    Example:
        class Generator:
            def generate(self, prompt, weights):
                return play(prompt, weights)

        made = rollouts.Rollouts(prompts, group_size=8).add_to(
            program, generator=Generator, generators=4
        )
        program.add_node(lp.PyClassNode(Trainer, made), label="trainer")
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        *,
        group_size: int = 1,
        max_staleness: int = 1,
        when_stale: str = "pace",
        epochs: int | None = 1,
        shuffle: bool = True,
        seed: int = 0,
        min_group_size: int | None = None,
        partial: bool = False,
        rollout_timeout_s: float | None = 600.0,
        environment_timeout_s: float | None = 120.0,
        reward_timeout_s: float | None = 120.0,
        max_attempts: int = 3,
        max_losses: int = 10,
        absence_s: float = 60.0,
        refuse_nan: bool = False,
        dtype: Dtype = None,
        size_of: Callable[[Any], float] | None = None,
    ) -> None:
        """Describes them.

        Args:
            prompts: A sequence of any picklable values.
            group_size: Rollouts of each prompt.
            max_staleness: Steps that a group may be older than the step that trains it. With 0,
                generators wait while the trainer trains.
            when_stale: "pace": generators wait so that nothing gets too old. "discard": they go on,
                and groups that are too old are thrown away and made again.
            epochs: How often each prompt is used; None: without end.
            shuffle: Whether each epoch has an order of its own.
            seed: Of these orders.
            min_group_size: A group may go on with so many rollouts if others take too long or fail;
                by default with all only.
            partial: Whether rollouts are made in parts: `generate(prompt, weights, parts)` gets those that
                were made before, and yields the others. A rollout that is cut, by a limit of time, a
                lost generator or new weights, goes on with its parts and the newest weights.
            rollout_timeout_s: Seconds after which a rollout is made again by another generator;
                None: without limit.
            environment_timeout_s: Seconds after which an environment that does not answer a call is given
                up; None: without limit.
            reward_timeout_s: The same for a reward.
            max_attempts: How often a rollout may raise or take too long; then its prompt is set aside.
            max_losses: How often it may lose its generator, or another node that it calls.
            absence_s: Seconds that a trainer waits when all generators, environments or rewards are lost.
            refuse_nan: As for `Weights`.
            dtype: As for `Weights`.
            size_of: Returns how many tokens or steps a rollout, or a part of one, has; for `status`.

        Raises:
            ValueError: A number is out of its range, or there is no prompt.
            TypeError: A number is none, or prompts are no sequence.
        """
        has_places = all(hasattr(prompts, name) for name in ("__len__", "__getitem__"))
        if not has_places or isinstance(prompts, str | bytes | Mapping):
            raise TypeError(f"Rollouts: prompts is a sequence, such as a list, not {prompts!r}")
        if not len(prompts):
            raise ValueError("Rollouts: prompts is empty")
        least = group_size if min_group_size is None else min_group_size
        for name, number, lowest in (
            ("group_size", group_size, 1),
            ("min_group_size", least, 1),
            ("max_staleness", max_staleness, 0),
            ("epochs", 1 if epochs is None else epochs, 1),
            ("max_attempts", max_attempts, 1),
            ("max_losses", max_losses, 0),
        ):
            check_number(f"Rollouts: {name}", number, lowest)
        if least > group_size:
            raise ValueError(f"Rollouts: min_group_size is at most {group_size}, not {least}")
        if when_stale not in ("pace", "discard"):
            raise ValueError(f"Rollouts: when_stale is 'pace' or 'discard', not {when_stale!r}")
        for name, seconds in (
            ("rollout_timeout_s", rollout_timeout_s),
            ("environment_timeout_s", environment_timeout_s),
            ("reward_timeout_s", reward_timeout_s),
            ("absence_s", absence_s),
        ):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"Rollouts: {name} is above 0, not {seconds}")
        self._environment_timeout_s = environment_timeout_s
        self._prompts = prompts
        self._order = PromptOrder(len(prompts), epochs, shuffle, seed)
        self._weights = Weights(refuse_nan=refuse_nan, dtype=dtype)
        self._size_of = size_of
        self._rules = BufferRules(
            group_size,
            least,
            max_staleness,
            when_stale == "discard",
            partial,
            math.inf if rollout_timeout_s is None else rollout_timeout_s,
            math.inf if reward_timeout_s is None else reward_timeout_s,
            max_attempts,
            max_losses,
            absence_s,
        )

    def add_to(
        self,
        program: lp.Program,
        *,
        generator: "Callable[[], Any] | lp.Deferred[Any]",
        generators: int,
        threads: int = 1,
        environment: "Callable[[], Any] | lp.Deferred[Any] | None" = None,
        environments: int = 1,
        reward: "Callable[[], Any] | lp.Deferred[Any] | None" = None,
        rewards: int = 1,
        label: str = "rollouts",
        folder: str | os.PathLike[str] | None = None,
    ) -> RolloutsHandle:
        """Adds the buffer, the weights and the generators to a program; returns a handle for the trainer.

        An environment is a node that a rollout has for itself while it is made. A reward judges
        rollouts that are made, while generators make others. Those that are lost, or hang, start
        again, each up to ten times a minute; `restart=` of the launch changes that.

        Args:
            program: What to add them to.
            generator: The class of the user's generators, with `generate(prompt, weights)`; with
                arguments as `lp.Deferred(Generator, 0.7)`. Each generator has one object of it. If that
                has `update_weights(params, version)`, it is called once with each version, in order,
                before rollouts that are made with it.
            generators: How many.
            threads: How many rollouts a generator makes at the same time, by threads that share its
                object.
            environment: Class of environments, or None: a client of one is the third argument of
                `generate`. With arguments as for `generator`.
            environments: How many.
            reward: Class of rewards, with `reward(prompt, rollout)`, or None. What it returns is in
                `Rollout.reward`. With arguments as for `generator`.
            rewards: How many.
            label: Of the buffer; the others are "weights", "generator", "environment" and "reward".
                With another label, these begin with it, as "play_generator".
            folder: Where the host of the buffer has a file `join.json` while the program runs, with which
                generators from outside `join`; None: nowhere.

        Raises:
            ValueError: A number is below 1, or the program has such a group.
            TypeError: `generator` or another one is no class, or a number is none.
        """
        prefix = "" if label == "rollouts" else f"{label}_"
        check_number("Rollouts: threads", threads, 1)
        given = {
            GENERATOR: (generator, generators, "generate(prompt, weights)"),
            ENVIRONMENT: (environment, environments, ""),
            REWARD: (reward, rewards, "reward(prompt, rollout)"),
        }
        made: dict[str, MadeFrom] = {}
        counts: dict[str, int] = {}
        for role, (constructor, count, method) in given.items():
            if constructor is None:
                continue
            check_number(f"Rollouts: {role}s", count, 1)
            one = constructor if isinstance(constructor, lp.Deferred) else lp.Deferred(constructor)
            if method and not callable(getattr(one.constructor, method.partition("(")[0], None)):
                raise TypeError(f"{one.constructor!r} has no {method}")
            made[role], counts[role] = (one.constructor, one.args, one.kwargs), count
        generate = made[GENERATOR][0].generate  # type: ignore[attr-defined]
        if self._rules.partial and not inspect.isgeneratorfunction(generate):
            raise TypeError(f"partial=True: {generate!r} does not yield parts")
        for each in (label, f"{prefix}weights", *(f"{prefix}{role}" for role in made)):
            if each in program.groups:
                raise ValueError(f"the program has a group {each!r}; give another label=")
        weights = self._weights.add_to(program, label=f"{prefix}weights")
        rules = self._rules._replace(members=counts)
        node = lp.CourierNode(BufferNode)
        buffer = program.add_node(node, label=label)
        leased: dict[str, Any] = {}
        for _ in range(counts.get(ENVIRONMENT, 0)):
            serving = ReturningNode(
                serve_environment,
                buffer,
                made[ENVIRONMENT],
                courier_client_kwargs={"call_timeout_s": self._environment_timeout_s},
            )
            serving.disable_run()  # a method of this name is one that generators call
            group = f"{prefix}{ENVIRONMENT}"
            leased[f"{group}[{len(leased)}]"] = program.add_node(serving, label=group)
        options: dict[str, Any] = {"partial": self._rules.partial, "size_of": self._size_of}
        for role, work in ((GENERATOR, GeneratorNode), (REWARD, RewardNode)):
            for _ in range(counts.get(role, 0)):
                new = ReturningNode(work, buffer, weights, made[role], threads, leased, **options)
                program.add_node(new, label=f"{prefix}{role}")
        for_joining: tuple[Any, ...] = ()
        if folder is not None:
            parts = made[GENERATOR], weights.args, threads, leased, options
            for_joining = str(Path(folder).absolute()), node.create_handle(), parts
        node.configure(self._prompts, self._order, rules, *for_joining)
        handle = RolloutsHandle(RolloutsClient, self._prompts, buffer, weights)
        handle.weights = weights
        return handle
