"""Replicators: the number, places and cooperation of replicas.

After Table 1 of Buchlovsky et al., "TF-Replicator: Distributed Machine Learning for Researchers"
(arXiv 1902.00465).
"""

import contextlib
import dataclasses
import enum
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import courier
import launchpad_lite as lp
from launchpad_lite.launching import Launcher, loaded_module
from launchpad_lite.replicas import _devices, _inputs, _payload, _torch_functions
from launchpad_lite.replicas._carrier import Carrier, Op
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._kept import State, check_can_be_kept, put_into
from launchpad_lite.replicas._mesh_node import MeshNode
from launchpad_lite.replicas._node import LOST, ReplicaNode, served_methods
from launchpad_lite.replicas._operations import share
from launchpad_lite.replicas._optimizers import averaging
from launchpad_lite.replicas._packing import combined
from launchpad_lite.replicas._progress import Report, Share, TrainingProgress
from launchpad_lite.replicas._state import LoopPlace, Training, packed
from launchpad_lite.replicas.errors import InterruptedTraining, ReplicaError

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)


class InputReplication(enum.Enum):
    """How many input pipelines there are."""

    #: One for all replicas of a worker; each batch is divided among them.
    PER_WORKER = "per_worker"
    #: One for each replica.
    PER_REPLICA = "per_replica"


class Then(enum.IntEnum):
    """What follows a step. The largest of all replicas counts, because most may not know it yet."""

    STEP = 0
    #: The input has ended.
    EMPTY = 1
    #: There are enough steps, or no replica has input.
    END = 2
    #: The program stops.
    STOP = 3
    #: The program stops before its work is done.
    INTERRUPT = 4


@dataclass
class Here:
    """The state of a replicator in a running replica.

    `collectives` are its calls together with the others, whose nodes are `replicas`. `share` serves
    a pipeline to the other replicas of the worker; `pipelines` counts those opened in this
    generation. `size` is how many replicas work together; None: as many as were planned. `depth`
    counts open runs: the last one is the innermost. `has_stopped`: a run has ended because the
    program stops.
    """

    rank: int
    collectives: Collectives
    training: Training
    label: str = "replica"
    generation: int = 0
    replicas: Sequence[Any] = ()
    share: Callable[[_inputs.Key, _inputs.SharedPipeline], None] = lambda *_: None
    pipelines: int = 0
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)
    report: Report = dataclasses.field(default_factory=Report)
    size: int | None = None
    depth: int = 0
    has_stopped: bool = False

    def has_next(self, inputs: _inputs.Inputs | None) -> bool:
        """Returns whether the input, if there is one, goes on; adds the time to the report."""
        begun_at = time.monotonic()
        has_next = inputs is None or inputs.has_next()
        self.report.input_s += time.monotonic() - begun_at
        return has_next

    def view(self) -> str:
        """Returns how far the replica is, for people."""
        lines = [str(self.report)] if self.report.steps or self.report.losses else []
        if (call := self.collectives.last) is not None:
            at = f", at {call.site}" if call.site else ""
            lines.append(f"collective {call.number:,}: {call.signature}{at}")
        return "\n".join(lines)


class Replicator:
    """Runs replicas. Choose one of its subclasses; all else stays the same.

    In the replicated function, it represents this replica. Not thread-safe there.

    Attributes:
        num_workers: How many groups of replicas that may share an input pipeline.
        replicas_per_worker: How many replicas each of them has.
        input_replication: How many input pipelines there are.
        input_split_fn: Divides a batch among a number of replicas; by default along the first dimension.

    Example:
        def train(repl):
            with repl.context() as device:
                model = Net()
                optimizer = repl.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            repl.keep(model=model, optimizer=optimizer)

            def step_fn(batch):
                images, labels = (each.to(device) for each in batch)
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return loss.detach()

            for losses in repl.run(step_fn, lambda replica_id: batches(replica_id), steps=100):
                print(sum(losses) / repl.num_replicas)

        replicas.MultiWorkerReplicator(num_workers=4).launch(train)
    """

    #: How many replicas go on after a loss (None: all), and the seconds that they wait for the
    #: rest.
    min_replicas: int | None = None
    patience_s: float = 0.0
    #: The nodes that run replicas, and how many each.
    _node_type: type[ReplicaNode] = ReplicaNode
    _replicas_per_node = 1

    def __init__(
        self,
        num_workers: int,
        devices_per_worker: int = 1,
        devices_per_replica: int = 1,
        input_replication: InputReplication = InputReplication.PER_REPLICA,
        input_split_fn: Callable[[Any, int], Sequence[Any]] = _inputs.split_leading,
    ) -> None:
        if devices_per_replica < 1 or devices_per_worker % devices_per_replica:
            raise ValueError(
                f"{type(self).__name__}: {devices_per_worker} devices cannot be divided into replicas "
                f"of {devices_per_replica}"
            )
        replicas_per_worker = devices_per_worker // devices_per_replica
        for name, number in (("workers", num_workers), ("replicas", replicas_per_worker)):
            if number < 1:
                raise ValueError(f"{type(self).__name__}: at least 1 of {name}, not {number}")
        self.num_workers = num_workers
        self.replicas_per_worker = replicas_per_worker
        self.devices_per_replica = devices_per_replica
        self.input_replication = input_replication
        self.input_split_fn = input_split_fn
        self._here: Here | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_replicas} replicas)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": None}  # the state of a replica is not pickled

    def __deepcopy__(self, memo: Any) -> "Replicator":
        return self  # models that call it may be copied

    # The identity of this replica.

    @property
    def num_replicas(self) -> int:
        """How many replicas there are; in a replica, how many work together now."""
        planned = self.num_workers * self.replicas_per_worker
        return planned if self._here is None else self._here.size or planned

    @property
    def num_pipelines(self) -> int:
        """How many input pipelines there are: how often `input_fn` is called, all in all."""
        shares = self.input_replication is InputReplication.PER_WORKER
        return self.num_replicas // (self.replicas_per_worker if shares else 1)

    @property
    def replica_id(self) -> int:
        """The number of this replica, from 0."""
        return self._me.rank

    @property
    def worker_id(self) -> int:
        """The worker of this replica, from 0."""
        return self._me.rank // self.replicas_per_worker

    @property
    def step(self) -> int:
        """How many steps have been made, those before a restart included."""
        return self._me.training.step

    @property
    def report(self) -> Report:
        """The cost of the steps so far."""
        return self._me.report

    @property
    def _me(self) -> Here:
        if self._here is None:
            raise ReplicaError(
                f"{self!r} is used in the function that it replicates: repl.launch(train), or "
                "repl.add_to(program, train)"
            )
        return self._here

    @contextlib.contextmanager
    def being(self, here: Here) -> Iterator[None]:
        """Makes it represent one replica in a block. For the node."""
        self._here = here
        try:
            yield
            if here.training.course.is_left:
                here.training.take_at_end()
        finally:
            here.training.end_steps()
            self._here = None

    # Devices.

    def context(self) -> "contextlib.AbstractContextManager[Any]":
        """Returns a block in which models and optimizers are made: on the replica's first device."""
        return self.logical_device(0)

    def logical_device(self, index: int) -> "contextlib.AbstractContextManager[Any]":
        """Returns a block whose tensors and arrays are on one of the devices of this replica.

        It gives the device: of PyTorch or of JAX, whichever is imported. Where there is no
        accelerator, all are the CPU.

        Raises:
            ValueError: The replica has no such device.
        """
        if not 0 <= index < self.devices_per_replica:
            raise ValueError(
                f"logical_device({index}): replica {self.replica_id} has "
                f"{self.devices_per_replica} device(s), from 0"
            )
        local = self._me.rank % self.replicas_per_worker * self.devices_per_replica + index
        return self._on_device(local)

    def _on_device(self, index: int) -> "contextlib.AbstractContextManager[Any]":
        """Returns a block on a device of this worker."""
        return _devices.on_device(index)

    # Calls of all replicas together.

    def all_reduce(self, values: Any, op: Op = "sum", label: str = "") -> Any:
        """Returns nested values, each leaf combined over the replicas.

        All replicas make the same calls in the same order, with values of the same structure. Tensors
        of PyTorch that need a gradient have one.

        Args:
            values: Arrays and numbers in dicts, lists, tuples and dataclasses.
            op: `sum`, `mean`, `max`, `min` or `product`.
            label: Names the call in errors.

        Raises:
            TypeError: A value is no number and no array.
            CollectiveMismatchError: Replicas made different calls.
        """
        if _torch_functions.needs_gradient(values):
            return _torch_functions.all_reduce(self._me.collectives, values, op, label)
        return self._me.collectives.all_reduce(values, op, label)

    def all_sum(self, values: Any, label: str = "") -> Any:
        """Returns nested values, summed over the replicas; as `all_reduce`."""
        return self.all_reduce(values, "sum", label)

    def all_gather(self, values: Any, label: str = "") -> list[Any]:
        """Returns the values of all replicas, by replica; they may differ in structure and size.

        Raises:
            TypeError: They cannot be pickled.
            CollectiveMismatchError: Replicas made different calls.
        """
        if _torch_functions.needs_gradient(values):
            return _torch_functions.all_gather(self._me.collectives, values, label)
        return self._me.collectives.all_gather(values, label)

    def broadcast(self, values: Any, source: int = 0, label: str = "") -> Any:
        """Returns the nested values of one replica, whose structure all have.

        Raises:
            ValueError: There is no such replica.
            CollectiveMismatchError: Replicas made different calls.
        """
        if _torch_functions.needs_gradient(values):
            return _torch_functions.broadcast(self._me.collectives, values, source, label)
        return self._me.collectives.broadcast(values, source, label)

    def map_reduce(
        self, function: Callable[[T], Any], items: Sequence[T], op: Op = "sum", label: str = ""
    ) -> Any:
        """Returns the combined results of a function for all items; the replicas divide the items.

        Args:
            function: Returns nested values of the same structure for each item.
            items: The same ones in all replicas, at least one.
            op: As for `all_reduce`.
            label: Names the call in errors.

        Raises:
            ValueError: There is no item, or the results differ in structure.
        """
        gathered = self.map_gather(function, items, label)
        if not gathered:
            raise ValueError("map_reduce needs at least one item")
        return combined(gathered, op)

    def map_gather(
        self, function: Callable[[T], Any], items: Sequence[T], label: str = ""
    ) -> list[Any]:
        """Returns the results of a function for all items, in order; the replicas divide the items.

        Args:
            function: Called for each item in one of the replicas.
            items: The same ones in all replicas.
            label: Names the call in errors.
        """
        begin, end = share(len(items), self.replica_id, self.num_replicas)
        mine = [function(item) for item in items[begin:end]]
        parts = self.all_gather(mine, label or "map_gather")
        return [result for part in parts for result in part]

    # Training.

    def wrap_optimizer(self, optimizer: Any, parameters: Any = None, **options: Any) -> Any:  # noqa: ARG002 - the parameters
        """Returns an optimizer of the same kind that averages gradients over the replicas first.

        Args:
            optimizer: Of PyTorch; or something with `update(gradients, ...)`, as in optax, or
                `apply_gradients(gradients, ...)`; or a function of gradients. Call the last two
                outside of `jax.jit`.
            parameters: Only for `MultiWorkerAsyncReplicator`, with optimizers that are not of
                PyTorch.
            **options: Of optimizers of PyTorch: `model`, `buffers`, `every` and `outer` are in
                docs/replicas.md. `overlap=False` takes means in `step()`, not in the backward pass;
                `bucket_bytes` is how much is averaged at a time; `label` names it in errors.

        Raises:
            TypeError: It is no optimizer, or there is no such option.
        """
        torch = loaded_module("torch")
        if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
            from launchpad_lite.replicas import _torch_optimizer

            return _torch_optimizer.wrap(optimizer, self._me.collectives, **options)
        if options:
            raise TypeError(f"only optimizers of PyTorch have options: {', '.join(options)}")
        return averaging(optimizer, lambda nest: self.all_reduce(nest, "mean", "gradients"))

    def keep(self, **things: Any) -> None:
        """Names the state of the training, and makes it the same in all replicas.

        After a restart, it goes back to the newest checkpoint; else all get that of replica 0.
        Checkpoints are kept by `checkpoints={"<label>": lp.Checkpoints(folder, period_s=60)}` at
        the launch. Without them, a replica that was lost gets the state from another one. A thing
        that is kept again by the same name does not go back.

        Args:
            **things: Objects with `state_dict()` and `load_state_dict()`, as models and optimizers
            of PyTorch; tensors, arrays of numpy; dicts and lists of these and of values. All are
            changed in place. Use `state` for values that can only be replaced.

        Raises:
            TypeError: A thing cannot be kept.
            ReplicaError: The checkpoint has not all of them, or with other types or shapes.
        """
        import numpy as np

        here, training = self._me, self._me.training
        if loaded_module("torch") is not None and here.collectives.size > 1:
            from launchpad_lite.replicas import _torch_optimizer

            _torch_optimizer.check_names(here.collectives, things)
        for name, thing in things.items():
            check_can_be_kept(name, thing)
        is_first, new = not here.kept, things.keys() - here.kept.keys()
        found = training.newest() if new else None
        label = f"keep({', '.join(things)})"
        found = found if found and found.kept else None
        offers = here.collectives.all_gather(found.step if found else -1, label)
        source = offers.index(max(offers))
        mine: dict[str, _payload.Payload] = {}
        told: Any = None
        if here.rank == source:
            old = training.claimed(found, new, is_first=is_first) if found else {}
            if is_first and not old and here.report.losses:
                _LOGGER.warning("%s: there is no snapshot; all begin again at step 0", here.label)
            mine = {name: old.get(name) or packed(name, thing) for name, thing in things.items()}
            heads = {name: (data, [*map(len, rest)]) for name, (data, *rest) in mine.items()}
            told = heads, set(old), found and (found.step, found.places)
        heads, restored, where = here.collectives.all_gather(told, label)[source]
        if is_first and where:
            training.go_on_at(*where)
        here.kept.update(things)
        if here.rank == 0 or training.is_guard:
            training.kept = here.kept
        for name, thing in things.items():
            data, sizes = heads[name]
            empty = (np.empty(size, np.uint8) for size in sizes)
            payload = mine.pop(name, None) or [data, *empty]
            for array in payload[1:]:
                here.collectives.fill(array, source, label)
            if here.rank != source or name in restored:
                put_into(name, thing, _payload.unpack(payload))
            training.note_kept(name, thing)

    def state(self, **values: Any) -> State:
        """Returns an object with values as attributes, and keeps it by the name `state`.

        It is for values that the code replaces, as numbers and arrays of JAX. Use them as its
        attributes: these are restored after a restart.

        Raises:
            TypeError: A value cannot be pickled.
            ReplicaError: There is a state already; or as `keep`.

        Example:
            state = repl.state(params=params, best=0.0)
            state.params = optax.apply_updates(state.params, updates)
        """
        if "state" in self._me.kept:
            raise ReplicaError("there is a state already; give repl.state() all values at once")
        state = State(**values)
        self.keep(state=state)
        return state

    def epochs(self, number: int) -> Iterator[int]:
        """Yields numbers of epochs, from 0; after a restart, from the interrupted epoch on.

        In that epoch, runs that were over make no steps, and the interrupted one goes on. When the
        program stops, there is no further epoch.

        Args:
            number: How many epochs there are, those before a restart included.

        Raises:
            CollectiveMismatchError: Replicas made different calls.

        Example:
            for epoch in repl.epochs(10):
                for losses in repl.run(step_fn, lambda index: loader_of(epoch, index)):
                    pass
                state.best = max(state.best, evaluate())
        """
        here = self._me
        course = here.training.course
        number = 0 if here.has_stopped else number
        place = course.enter("epochs")
        try:
            while place.made < number and not place.is_over:
                here.collectives.all_gather(None, f"epoch {place.made} of {number}")
                with course.in_loop():
                    yield place.made
                    if here.has_stopped:
                        return
                    course.end_epoch(place)
                here.training.take_at_end()
        except GeneratorExit:
            place.is_over = True
            raise

    def run(
        self,
        step_fn: Callable[..., T],
        input_fn: Callable[..., Any] | None = None,
        *,
        steps: int | None = None,
        progress_s: float = 10.0,
        tensorboard: str | None = None,
        counts: bool = True,
        uneven: str = "end",
    ) -> Iterator[list[T]]:
        """Makes steps; yields after each of them the results of all replicas, by replica.

        Ends after `steps`, when an input ends, or when a node or the launching script stops the program:
        in all replicas after the same step. Calls are numbered in their order. After a restart, the
        interrupted one goes on, those before it make no steps, and those after it begin from their
        start.

        Args:
            step_fn: One step of this replica: takes a batch, returns any value that can be pickled.
            input_fn: Takes the index of the replica (of the worker, with `PER_WORKER`); returns an
                iterable of batches, or a callable that returns the next one, or raises StopIteration.
                A thread asks a slow iterable for the next batch while a step is made; a callable is
                called between two steps. After a restart, an `input_fn` that takes `step`, too, begins
                at that step of this run; from other iterables that many batches are dropped. None:
                `step_fn` takes nothing.
            steps: How many steps this run makes, those before a restart included; None: until the
                input ends. The same in all replicas.
            progress_s: Seconds between two lines of progress, of replica 0.
            tensorboard: A folder for TensorBoard: numbers in what `step_fn` returns, as means over the
                replicas, and the speed.
            counts: Whether its steps are those of the training: in `repl.step`, and after a restart. Give
                False for an evaluation, which begins from its start then. A run in the loop of another
                one never counts.
            uneven: What happens when some inputs have ended: all replicas `end`; or those without input
                `join` the steps of the others with the last batch again. Sums, means and yielded
                results of these steps are over the others.

        Raises:
            ValueError: `uneven` is something else.
            InputSplitError: A batch cannot be divided among the replicas of a worker.
            CollectiveMismatchError: Replicas made different calls.
            KeyboardInterrupt: Between two steps: a signal as Ctrl-C, or the failure of another node,
                stops the program, so this is not the end of the training.
        """
        if uneven not in ("end", "join"):
            raise ValueError(f"uneven is 'end' or 'join', not {uneven!r}")
        here, training = self._me, self._me.training
        counts = counts and not here.depth
        begun_at = time.monotonic() - here.report.seconds
        place = (
            training.course.enter("run") if counts and not here.has_stopped else LoopPlace("run", 0)
        )
        first, then, inputs = place.made, Then.STOP if here.has_stopped else Then.END, None
        idle: list[int] = []
        if not here.has_stopped and not place.is_over:
            inputs = self._inputs(input_fn, first) if input_fn else None
            mine = self._then(inputs, place, 0, steps)
            answers = here.collectives.all_gather(mine, f"run({steps=}, {counts=}, {uneven=})")
            then, idle = self._agreed(answers, uneven, place)
            if idle and inputs is not None:  # replicas that never had a batch get one
                source = answers.index(Then.STEP)
                batch = inputs.last if here.rank == source else None
                batches = here.collectives.all_gather(batch, "a batch to stand in")
                if here.rank in idle:
                    inputs.last = batches[source]
        before = training.step - first if counts else 0
        total = None if steps is None else before + steps
        with self._open_run(place, inputs, counts, total, progress_s, tensorboard) as progress:
            while then is Then.STEP:
                if counts:
                    training.between_steps()
                here.collectives.idle = idle
                results, shares, answers = self._step(step_fn, inputs, place, steps)
                here.collectives.idle = ()
                training.step += counts
                results = [each for rank, each in enumerate(results) if rank not in idle]
                then, idle = self._agreed(answers, uneven, place)
                if progress is not None:
                    progress.note(before + place.made, results, shares)
                yield results
                here.report.seconds = time.monotonic() - begun_at
            if counts and place.made > first:
                training.take_at_end()
        here.has_stopped = then is not Then.END
        if then is Then.INTERRUPT:
            raise InterruptedTraining(f"{here.label}: interrupted between two steps")
        if place.made == first and then is Then.END and here.rank == 0:
            was_made = first or place.is_over
            why = "its steps were made before a restart" if was_made else "its input has no batch"
            _LOGGER.warning(
                "%s: a run makes no step: %s", here.label, why if steps != 0 else "steps=0"
            )

    @contextlib.contextmanager
    def _open_run(
        self, place: LoopPlace, inputs: "_inputs.Inputs | None", counts: bool, *settings: Any
    ) -> Iterator[TrainingProgress | None]:
        """Opens a run in a block; gives its progress, with these settings, on replica 0."""
        here, progress = self._me, None
        here.depth += 1
        if counts:
            here.training.begin_steps()
        try:
            if here.rank == 0:
                progress = TrainingProgress(here.label, *settings)
            yield progress
        except GeneratorExit:
            place.is_over = True  # or an error has left the loop; then nothing is saved any more
            raise
        finally:
            here.depth -= 1
            if counts:
                here.training.end_steps()
            if inputs is not None:
                inputs.close()
            if progress is not None:
                progress.close()

    def _step(
        self,
        step_fn: Callable[..., T],
        inputs: "_inputs.Inputs | None",
        place: LoopPlace,
        steps: int | None,
    ) -> tuple[list[T], list[Share], list[Then]]:
        """Makes a step; returns the results, work so far, and next `Then` of all."""
        here = self._me
        if inputs is None:
            result = step_fn()
        else:
            batch = inputs.next(is_last=steps is not None and place.made + 1 >= steps)
            if here.rank not in here.collectives.idle:
                here.report.examples += _inputs.examples_in(batch)
            result = step_fn(batch)
        then = self._then(inputs, place, 1, steps)
        share = Share(here.report.examples, here.collectives.seconds, here.report.input_s)
        mine = result, share, then
        every = here.collectives.all_gather(mine, "what step_fn returns")
        place.made += 1
        here.report.steps += 1
        here.report.waited_s = here.collectives.seconds
        results, shares, answers = zip(*every, strict=True)
        return list(results), list(shares), list(answers)

    def _agreed(
        self, answers: Sequence[Then], uneven: str, place: LoopPlace
    ) -> tuple[Then, list[int]]:
        """Returns what follows, from the `_then` of all, and the replicas without input for it."""
        then = max(answers)
        ended = [rank for rank, answer in enumerate(answers) if answer is Then.EMPTY]
        if then is not Then.EMPTY:
            return then, []
        if len(ended) == len(answers):
            return Then.END, []
        if uneven == "join":
            return Then.STEP, ended
        if self._me.rank == 0:
            _LOGGER.warning(
                "%s: the input of replica %s has ended before that of others, after step %d, so all "
                "end; uneven='join' goes on with the others",
                self._me.label,
                ", ".join(map(str, ended)),
                place.made,
            )
        return Then.END, []

    def _then(
        self, inputs: "_inputs.Inputs | None", place: LoopPlace, more: int, steps: int | None
    ) -> Then:
        """Returns what follows for this replica after so many more steps; fetches a batch."""
        if steps is not None and place.made + more >= steps:
            return Then.END  # an input may wait for ever for a batch that is not needed
        with contextlib.suppress(lp.NoProgramError):
            if lp.stop_event().is_set():
                return Then.INTERRUPT if lp.current_node().is_interrupted else Then.STOP
        return Then.STEP if self._me.has_next(inputs) else Then.EMPTY

    def _inputs(self, input_fn: Callable[..., Any], made: int) -> _inputs.Inputs:
        here = self._me
        if self.num_pipelines == self.num_replicas:
            return _inputs.Inputs(_inputs.opened(input_fn, here.rank, made).take)
        lead = self.worker_id * self.replicas_per_worker
        here.pipelines += 1
        key = here.generation, here.depth, here.pipelines
        positions = itertools.count()
        if here.rank == lead:
            pipeline = _inputs.opened(input_fn, self.worker_id, made)
            shared = _inputs.SharedPipeline(pipeline, self.replicas_per_worker, self.input_split_fn)
            here.share(key, shared)
            return _inputs.Inputs(lambda: shared.take(next(positions), 0))

        def take() -> _inputs.Batch:
            node = here.replicas[lead]
            call = node.futures.replica_input(key, next(positions), here.rank - lead)
            found: _inputs.Batch = here.collectives.result_of(call)
            return found

        return _inputs.Inputs(take)

    # Starting.

    def add_to(
        self,
        program: lp.Program,
        body: Callable[..., Any],
        *args: Any,
        label: str = "replica",
        **kwargs: Any,
    ) -> lp.Handle[Any]:
        """Adds the replicas to a program; returns a handle of replica 0, for its other nodes.

        Args:
            program: What to add them to.
            body: A function, or a class with `run()`, which each replica calls with this replicator
                and the arguments. Other nodes may call the other methods of the class.
            *args: Its arguments; handles in them become clients.
            label: The name of the group.
            **kwargs: Its arguments by name.

        Raises:
            ValueError: The program has such a group, or a method has a name that replicas use.
        """
        return self._add_to(program, body, args, kwargs, label, stays=False)

    def _add_to(
        self,
        program: lp.Program,
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        label: str,
        *,
        stays: bool,
    ) -> lp.Handle[Any]:
        if not callable(body):
            raise TypeError(f"{self!r} replicates a function or a class, not {body!r}")
        if isinstance(body, type):
            served_methods(body)
        if label in program.groups:
            raise ValueError(f"the program has a group {label!r}; give another label=")
        nodes = [
            lp.CourierNode(self._node_type)
            for _ in range(self.num_replicas // self._replicas_per_node)
        ]
        handles = [node.create_handle() for node in nodes]
        more = self._add_more(program, label)
        with program.group(label):
            for rank, node in enumerate(nodes):
                node.configure(self, rank, handles, body, list(args), kwargs, stays, *more)
                program.add_node(node)
        return handles[0]

    def _add_more(self, program: lp.Program, label: str) -> Sequence[Any]:  # noqa: ARG002
        """Adds nodes beside the replicas; returns further arguments of a replica's node."""
        return ()

    def launch(
        self,
        body: Callable[..., Any],
        *args: Any,
        launcher: str | Launcher = "local_mp",
        label: str = "replica",
        launch_options: "dict[str, Any] | None" = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs the replicas as a program of their own; returns the result of each of them.

        Args:
            body: As for `add_to`.
            *args: As for `add_to`.
            launcher: Where they run, as for `lp.launch`.
            label: The name of the group.
            launch_options: Options of `lp.launch`: `restart`, `checkpoints`, `resources`, `hosts`, ..
            **kwargs: As for `add_to`.

        Raises:
            NodeFailedError: A replica has failed for good.
            ReplicaError: The program was stopped before the end.
        """
        program = lp.Program(getattr(body, "__name__", "replicas"))
        handle = self._add_to(program, body, args, kwargs, label, stays=True)
        running = lp.launch(program, launcher, **(launch_options or {}))
        try:
            results = _results(running, courier.with_timeout(handle.dereference(), 5.0))
            running.complete()
            return results
        finally:
            running.stop()


def _results(running: lp.RunningProgram, node: Any) -> list[Any]:
    while not running.join(0.0):
        with contextlib.suppress(*LOST, courier.CallCancelledError, ReplicaError):  # it stops
            results: list[Any] = node.replica_results()
            return results
        running.join(0.1)
    running.wait()  # raises why
    raise ReplicaError("the replicas were stopped before their end")


class NonReplicator(Replicator):
    """A single replica. It also works in a script that launches nothing: make one for each training.

    Example:
        train(replicas.NonReplicator())
    """

    def __init__(self) -> None:
        super().__init__(1)

    @property
    def _me(self) -> Here:
        if self._here is None:
            self._here = Here(0, Collectives(Carrier()), Training())
        return self._here


class MultiGpuReplicator(Replicator):
    """All devices of one worker: a replica for each of them, or for several.

    Example:
        repl = replicas.MultiGpuReplicator(num_gpus=8, num_gpus_per_replica=2)
        repl.launch(train)  # 4 replicas; `with repl.logical_device(1):` in each
    """

    def __init__(
        self,
        num_gpus: int | None = None,
        num_gpus_per_replica: int = 1,
        *,
        input_replication: InputReplication = InputReplication.PER_WORKER,
        input_split_fn: Callable[[Any, int], Sequence[Any]] = _inputs.split_leading,
    ) -> None:
        """Describes them.

        Args:
            num_gpus: How many devices; None: all that this process may see. Where there is none,
                CPU devices take their place, one for each core.
            num_gpus_per_replica: How many of them a replica has, as `logical_device`.
            input_replication: How many input pipelines there are.
            input_split_fn: Divides a batch among a number of replicas.

        Raises:
            ValueError: The devices cannot be divided evenly.
        """
        devices = _devices.count() if num_gpus is None else num_gpus
        super().__init__(1, devices, num_gpus_per_replica, input_replication, input_split_fn)


class MultiWorkerReplicator(Replicator):
    """Many workers, synchronous.

    Example:
        repl = replicas.MultiWorkerReplicator(num_workers=4)
        repl.launch(train, launcher="ssh", launch_options={"hosts": ["one", "two"]})
    """

    def __init__(
        self,
        num_workers: int,
        num_gpus_per_worker: int = 1,
        num_gpus_per_replica: int = 1,
        *,
        input_replication: InputReplication = InputReplication.PER_WORKER,
        input_split_fn: Callable[[Any, int], Sequence[Any]] = _inputs.split_leading,
        min_workers: int | None = None,
        patience_s: float = 30.0,
    ) -> None:
        """Describes them.

        Args:
            num_workers: How many workers.
            num_gpus_per_worker: How many devices each of them has; CPU devices where there is none.
            num_gpus_per_replica: How many of them a replica has, as `logical_device`.
            input_replication: How many input pipelines there are.
            input_split_fn: Divides a batch among a number of replicas.
            min_workers: After a loss, at least so many go on, if the others are not back in time;
                means are then over fewer replicas, whose numbers are 0, 1, .. again. A replica that
                comes back takes part again. All wait for replica 0 in any case. By default they
                wait for all.
            patience_s: Seconds until the remaining workers go on.

        Raises:
            ValueError: A number is too small, the devices cannot be divided evenly, or workers that
                may be missing have several replicas.
        """
        super().__init__(
            num_workers,
            num_gpus_per_worker,
            num_gpus_per_replica,
            input_replication,
            input_split_fn,
        )
        if min_workers is not None:
            if not 1 <= min_workers <= num_workers or self.replicas_per_worker > 1:
                raise ValueError(
                    f"MultiWorkerReplicator: min_workers is 1 to {num_workers}, for workers of one "
                    f"replica, not {min_workers} for workers of {self.replicas_per_worker}"
                )
            self.min_replicas, self.patience_s = min_workers, patience_s


class TpuReplicator(Replicator):
    """The cores of TPUs, through JAX; virtual CPU devices of JAX where there is no TPU.

    The replicas of a worker are threads of one process, and each has a device. Arrays of JAX are
    combined from device to device; between workers, through their hosts. Not yet run on a TPU.

    Example:
        repl = replicas.TpuReplicator(num_workers=1, num_tpu_cores_per_worker=8)
        repl.launch(train)
    """

    _node_type = MeshNode

    def __init__(
        self,
        num_workers: int = 1,
        num_tpu_cores_per_worker: int = 8,
        num_tpu_cores_per_replica: int = 1,
        *,
        input_replication: InputReplication = InputReplication.PER_WORKER,
        input_split_fn: Callable[[Any, int], Sequence[Any]] = _inputs.split_leading,
    ) -> None:
        """Describes them; as for `MultiWorkerReplicator`, with devices of JAX in place of GPUs.

        Raises:
            ValueError: A number is too small, or the devices cannot be divided evenly.
        """
        super().__init__(
            num_workers,
            num_tpu_cores_per_worker,
            num_tpu_cores_per_replica,
            input_replication,
            input_split_fn,
        )
        self._replicas_per_node = self.replicas_per_worker

    def __setstate__(self, state: "dict[str, Any]") -> None:
        # First, because arrays of JAX in arguments and checkpoints make JAX create its devices.
        vars(self).update(state)
        _devices.ask_jax_for(self._num_devices)

    @property
    def _num_devices(self) -> int:
        return self.replicas_per_worker * self.devices_per_replica

    def _on_device(self, index: int) -> "contextlib.AbstractContextManager[Any]":
        return _devices.on_device_of_jax(_devices.of_jax(self._num_devices)[index])
