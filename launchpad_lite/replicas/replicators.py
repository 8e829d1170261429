"""Replicators: how many replicas there are, where, and how they work together.

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
from launchpad_lite.launching import loaded_module
from launchpad_lite.replicas import _devices, _inputs, _torch_functions
from launchpad_lite.replicas._carrier import AloneCarrier, Op
from launchpad_lite.replicas._collectives import Collectives, split
from launchpad_lite.replicas._mesh_node import MeshNode
from launchpad_lite.replicas._node import ReplicaNode, served_methods
from launchpad_lite.replicas._optimizers import averaging
from launchpad_lite.replicas._progress import Progress, Report, Share
from launchpad_lite.replicas._state import (
    Snapshot,
    Training,
    check_can_be_kept,
    put_into,
    taken_from,
)
from launchpad_lite.replicas.errors import ReplicaError

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)


class InputReplication(enum.Enum):
    """How many input pipelines there are."""

    #: One for all replicas of a worker; each batch is divided among them.
    PER_WORKER = "per_worker"
    #: One for each replica.
    PER_REPLICA = "per_replica"


@dataclass
class Here:
    """What a replicator is in a replica that runs.

    Attributes:
        rank: Which replica it is.
        collectives: What it calls together with the others.
        training: How far it is.
        label: The group of the replicas.
        generation: Which one.
        replicas: Clients of all replicas' nodes.
        share: Serves a pipeline to the other replicas of the worker, by generation and number.
        pipelines: How many were opened in this generation.
        kept: What the user keeps, by name.
        report: What the steps have cost.
        size: How many replicas work together; None: as many as were planned.
    """

    rank: int
    collectives: Collectives
    training: Training
    label: str = "replica"
    generation: int = 0
    replicas: Sequence[Any] = ()
    share: Callable[[tuple[int, int], _inputs.SharedPipeline], None] = lambda *_: None
    pipelines: int = 0
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)
    report: Report = dataclasses.field(default_factory=Report)
    size: int | None = None

    def has_next(self, inputs: _inputs.Inputs | None) -> bool:
        """Returns whether an input, if there is one, goes on; notes how long that took."""
        begun_at = time.monotonic()
        has_next = inputs is None or inputs.has_next()
        self.report.input_s += time.monotonic() - begun_at
        return has_next


class Replicator:
    """Runs replicas. Choose one of its subclasses; all else stays the same.

    In the function that is replicated, it stands for this replica. Not thread-safe there.

    Attributes:
        num_workers: How many groups of replicas that may share an input pipeline.
        replicas_per_worker: How many replicas each of them has.
        input_replication: How many input pipelines there are.
        input_split_fn: Divides a batch among a number of replicas; by default along the first dimension.

    Example:
        def train(repl):
            with repl.context():
                model = Net()
                optimizer = repl.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            repl.keep(model=model, optimizer=optimizer)

            def step_fn(batch):
                images, labels = batch
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return loss.detach()

            for losses in repl.run(step_fn, lambda replica_id: batches(replica_id), steps=100):
                print(sum(losses) / repl.num_replicas)

        replicas.MultiWorkerReplicator(num_workers=4).launch(train)
    """

    #: How many replicas go on after a loss (None: all), when they have waited so long for the rest.
    min_replicas: int | None = None
    patience_s: float = 0.0
    #: What runs replicas, and how many each.
    _node_type: type[ReplicaNode] = ReplicaNode
    _replicas_per_node = 1

    def __init__(
        self,
        num_workers: int,
        replicas_per_worker: int,
        devices_per_replica: int,
        input_replication: InputReplication,
        input_split_fn: Callable[[Any, int], Sequence[Any]],
    ) -> None:
        for name, number in (
            ("workers", num_workers),
            ("replicas", replicas_per_worker),
            ("devices per replica", devices_per_replica),
        ):
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
        return {**self.__dict__, "_here": None}  # which replica it is does not travel

    def __deepcopy__(self, memo: Any) -> "Replicator":
        return self  # models that call it may be copied

    # Which replica this is.

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
        """Which replica this is, from 0."""
        return self._me.rank

    @property
    def worker_id(self) -> int:
        """Which worker this replica belongs to, from 0."""
        return self._me.rank // self.replicas_per_worker

    @property
    def step(self) -> int:
        """How many steps have been made, those before a restart included."""
        return self._me.training.step

    @property
    def report(self) -> Report:
        """What the steps have cost so far."""
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
        """Has it stand for one replica in a block. For the node."""
        self._here = here
        try:
            yield
        finally:
            here.training.end()
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

    # What replicas call together.

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
        """Returns the combined results of a function for all items, which the replicas share.

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
        from launchpad_lite.replicas._packing import combined

        return combined(gathered, op)

    def map_gather(
        self, function: Callable[[T], Any], items: Sequence[T], label: str = ""
    ) -> list[Any]:
        """Returns the results of a function for all items, in order; the replicas share the items.

        Args:
            function: Called for each item in one of the replicas.
            items: The same ones in all replicas.
            label: Names the call in errors.
        """
        mine = split(items, self.replica_id, self.num_replicas)
        parts = self.all_gather([function(item) for item in mine], label or "map_gather")
        return [result for part in parts for result in part]

    # Training.

    def wrap_optimizer(self, optimizer: Any, parameters: Any = None, **options: Any) -> Any:  # noqa: ARG002 - the parameters
        """Returns an optimizer of the same kind that averages gradients over the replicas first.

        Args:
            optimizer: Of PyTorch; or something with `update(gradients, ...)`, as in optax, or
                `apply_gradients(gradients, ...)`; or a function of gradients. What is not of PyTorch
                is called outside of `jax.jit`.
            parameters: What `MultiWorkerAsyncReplicator` needs for what is not of PyTorch; others need
                it not.
            **options: Of optimizers of PyTorch.

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
        """Says what the state of the training is, and makes it the same in all replicas.

        After a restart, it becomes what it was at the newest checkpoint; else all get that of
        replica 0. Checkpoints are kept by `checkpoints={"<label>": lp.Checkpoints(folder, period_s=60)}`
        at the launch.

        Args:
            **things: What has `state_dict()` and `load_state_dict()`, as models and optimizers of
                PyTorch have; dicts, lists, and arrays of numpy, which are changed in place.

        Raises:
            TypeError: A thing cannot be kept.
            ReplicaError: The checkpoint has not all of them.
        """
        here = self._me
        for name, thing in things.items():
            check_can_be_kept(name, thing)
        found, mine = None, None
        if here.rank == 0:
            found = here.training.newest(list(things), is_first=not here.kept)
            taken = {name: taken_from(thing) for name, thing in things.items()}
            mine = found or Snapshot(here.training.step, taken)
        here.kept.update(things)
        names = f"keep({', '.join(things)})"
        here.training.step, state = self._me.collectives.all_gather(mine, names)[0]
        for name, thing in things.items():
            if here.rank or found:
                put_into(name, thing, state[name])

    def run(
        self,
        step_fn: Callable[..., T],
        input_fn: Callable[..., Any] | None = None,
        *,
        steps: int | None = None,
        progress_s: float = 10.0,
        tensorboard: str | None = None,
        uneven: str = "end",
    ) -> Iterator[list[T]]:
        """Makes steps; yields after each of them what every replica has returned, by replica.

        Ends after `steps`, when an input ends, or when the program stops: in all replicas after the
        same step.

        Args:
            step_fn: One step of this replica: takes a batch, returns any value that can be pickled.
            input_fn: Takes the index of the replica (of the worker, with `PER_WORKER`); returns an
                iterable of batches, or a callable that returns the next one, or raises StopIteration.
                A thread asks a slow iterable for the next batch while a step is made; a callable is
                called between two steps. An `input_fn` that takes `step`, too, begins there; from
                other iterables that many batches are dropped after a restart. None: `step_fn` takes
                nothing.
            steps: How many steps there will be, those before a restart included; None: until the
                input ends.
            progress_s: Seconds between two lines of progress, of replica 0.
            tensorboard: A folder for TensorBoard: numbers in what `step_fn` returns, as means over the
                replicas, and the speed.
            uneven: What happens when some inputs have ended: all replicas `end`; or those without input
                `join` the steps of the others with the last batch again. In these steps they are left
                out of sums, means and what is yielded; means are over the others.

        Raises:
            ValueError: `uneven` is something else.
            InputSplitError: A batch cannot be divided among the replicas of a worker.
            CollectiveMismatchError: Replicas made different calls.
        """
        if uneven not in ("end", "join"):
            raise ValueError(f"uneven is 'end' or 'join', not {uneven!r}")
        here = self._me
        inputs = self._inputs(input_fn) if input_fn else None
        progress = Progress(here.label, steps, progress_s, tensorboard) if here.rank == 0 else None
        here.training.begin(here.kept if here.rank == 0 else {})  # others begin as replica 0
        begun_at = time.monotonic() - here.report.seconds
        answers = here.collectives.all_gather(self._goes_on(inputs, 0, steps), f"run({uneven=})")
        goes_on, idle = self._agreed(answers, uneven)
        if idle and inputs is not None:  # those who have never had a batch get one
            source = answers.index(True)
            mine = inputs.last if here.rank == source else None
            batches = here.collectives.all_gather(mine, "a batch to stand in")
            if here.rank in idle:
                inputs.last = batches[source]
        try:
            while goes_on:
                here.training.between_steps()
                here.collectives.idle = idle
                results, shares, answers = self._step(step_fn, inputs, steps)
                here.collectives.idle = ()
                results = [each for rank, each in enumerate(results) if rank not in idle]
                goes_on, idle = self._agreed(answers, uneven)
                if progress is not None:
                    progress.note(here.training.step, results, shares)
                yield results
                here.report.seconds = time.monotonic() - begun_at
            here.training.take()
        finally:
            here.training.end()
            if inputs is not None:
                inputs.close()
            if progress is not None:
                progress.close()

    def _step(
        self, step_fn: Callable[..., T], inputs: "_inputs.Inputs | None", steps: int | None
    ) -> tuple[list[T], list[Share], list[bool | None]]:
        """Makes a step; returns what all have returned, done so far, and say of another step."""
        here = self._me
        if inputs is None:
            result = step_fn()
        else:
            batch = inputs.next(is_last=steps is not None and here.training.step + 1 >= steps)
            if here.rank not in here.collectives.idle:
                here.report.examples += _inputs.examples_in(batch)
            result = step_fn(batch)
        goes_on = self._goes_on(inputs, 1, steps)
        share = Share(here.report.examples, here.collectives.seconds, here.report.input_s)
        mine = result, share, goes_on
        every = here.collectives.all_gather(mine, "what step_fn returns")
        here.training.step += 1
        here.report.steps += 1
        here.report.waited_s = here.collectives.seconds
        results, shares, go_on = zip(*every, strict=True)
        return list(results), list(shares), list(go_on)

    def _agreed(self, answers: Sequence[bool | None], uneven: str) -> tuple[bool, list[int]]:
        """Returns whether there is another step, for `_goes_on` of all, and who has no input for it."""
        ended = [rank for rank, answer in enumerate(answers) if answer is False]
        if None in answers or len(ended) in (0, len(answers)):
            return all(answers), []
        if uneven == "join":
            return True, ended
        if self._me.rank == 0:
            _LOGGER.warning(
                "%s: the input of replica %s has ended before that of others, after step %d, so all "
                "end; uneven='join' goes on with the others",
                self._me.label,
                ", ".join(map(str, ended)),
                self._me.training.step,
            )
        return False, []

    def _goes_on(
        self, inputs: "_inputs.Inputs | None", made: int, steps: int | None
    ) -> bool | None:
        """Returns whether this replica has input after so many steps more; None: there are no more."""
        if steps is not None and self._me.training.step + made >= steps:
            return None  # an input may wait for ever for a batch that nobody needs
        with contextlib.suppress(lp.NoProgramError):
            if lp.stop_event().is_set():
                return None
        return self._me.has_next(inputs)

    def _inputs(self, input_fn: Callable[..., Any]) -> _inputs.Inputs:
        here = self._me
        shares = (
            self.input_replication is InputReplication.PER_WORKER and self.replicas_per_worker > 1
        )
        index = self.worker_id if shares else here.rank
        lead = self.worker_id * self.replicas_per_worker
        here.pipelines += 1
        key = here.generation, here.pipelines
        positions = itertools.count()
        if not shares or here.rank == lead:
            pipeline = _inputs.opened(input_fn, index, here.training.step)
            if not shares:
                return _inputs.Inputs(pipeline.take)
            shared = _inputs.SharedPipeline(pipeline, self.replicas_per_worker, self.input_split_fn)
            here.share(key, shared)
            return _inputs.Inputs(lambda: shared.take(next(positions), 0))
        node = here.replicas[lead]

        def take() -> _inputs.Batch:
            call = node.futures.replica_input(key, next(positions), here.rank - lead)
            found: _inputs.Batch = here.collectives.result_of(call)
            return found.unpacked()

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
        launcher: str = "local_mp",
        label: str = "replica",
        launch_options: "dict[str, Any] | None" = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs the replicas as a program of their own; returns what each of them has returned.

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
        with contextlib.suppress(
            courier.ServerLostError,
            courier.ServerUnreachableError,
            courier.CallTimeoutError,
            courier.CallCancelledError,
            ReplicaError,  # it stops
        ):
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
        super().__init__(1, 1, 1, InputReplication.PER_REPLICA, _inputs.split_leading)

    @property
    def _me(self) -> Here:
        if self._here is None:
            self._here = Here(0, Collectives(AloneCarrier()), Training())
        return self._here


class MultiGpuReplicator(Replicator):
    """All devices of one worker: a replica for each of them, or for each few of them.

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
        if num_gpus_per_replica < 1 or devices % num_gpus_per_replica:
            raise ValueError(
                f"MultiGpuReplicator: {devices} devices cannot be divided into replicas of "
                f"{num_gpus_per_replica}"
            )
        super().__init__(
            1,
            devices // num_gpus_per_replica,
            num_gpus_per_replica,
            input_replication,
            input_split_fn,
        )


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
            min_workers: After a loss, so many go on, if the others are not back in time; means are
                then over fewer replicas, whose numbers are 0, 1, .. again. When one comes back, it
                takes part again. Replica 0 is always waited for. By default all are.
            patience_s: Seconds until those who are there go on.

        Raises:
            ValueError: A number is too small, the devices cannot be divided evenly, or workers that
                may be missing have several replicas.
        """
        if num_gpus_per_replica < 1 or num_gpus_per_worker % num_gpus_per_replica:
            raise ValueError(
                f"MultiWorkerReplicator: {num_gpus_per_worker} devices cannot be divided into "
                f"replicas of {num_gpus_per_replica}"
            )
        super().__init__(
            num_workers,
            num_gpus_per_worker // num_gpus_per_replica,
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
        """Describes them.

        Args:
            num_workers: How many workers.
            num_tpu_cores_per_worker: How many devices of JAX each of them has.
            num_tpu_cores_per_replica: How many of them a replica has, as `logical_device`.
            input_replication: How many input pipelines there are.
            input_split_fn: Divides a batch among a number of replicas.

        Raises:
            ValueError: A number is too small, or the devices cannot be divided evenly.
        """
        if num_tpu_cores_per_replica < 1 or num_tpu_cores_per_worker % num_tpu_cores_per_replica:
            raise ValueError(
                f"TpuReplicator: {num_tpu_cores_per_worker} devices cannot be divided into replicas "
                f"of {num_tpu_cores_per_replica}"
            )
        super().__init__(
            num_workers,
            num_tpu_cores_per_worker // num_tpu_cores_per_replica,
            num_tpu_cores_per_replica,
            input_replication,
            input_split_fn,
        )
        self._replicas_per_node = self.replicas_per_worker

    def __setstate__(self, state: "dict[str, Any]") -> None:
        # Arrays of JAX may follow, in arguments and checkpoints: they have it make its devices.
        vars(self).update(state)
        _devices.ask_jax_for(self._num_devices)

    @property
    def _num_devices(self) -> int:
        return self.replicas_per_worker * self.devices_per_replica

    def _on_device(self, index: int) -> "contextlib.AbstractContextManager[Any]":
        return _devices.on_device_of_jax(_devices.of_jax(self._num_devices)[index])
