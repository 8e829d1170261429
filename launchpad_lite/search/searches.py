"""Models that are ready to use: random search, evolution, early stopping, samplers of Optuna."""

import bisect
import collections
import itertools
import math
import random
import re
import types
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from launchpad_lite.errors import MissingExtraError
from launchpad_lite.search.errors import FailedTaskError, SearchError
from launchpad_lite.search.models import Model, name_of, number_of
from launchpad_lite.search.tasks import LIMITS, Task, options_of

C = TypeVar("C")

#: Attributes that another call of a search may change, besides functions.
_RENEWED = ("_evaluate", "_limits", "_space", "_enqueued", "_rounds", "_last_rung")


class Candidate(Task, Generic[C]):
    """A call of the user's function with a candidate; returns how good that is.

    Attributes:
        candidate: The parameters that are tried.
        parent: Number of the trial whose folder it goes on from; None: it begins from nothing.
        steps: As `RunningTrial.steps`.
        number: As `Trial.number`, once the search has it.

    Example:
        class Better(search.RandomSearch):
            def tell(self, task, result):
                super().tell(task, result)
                print(task.candidate, result)  # task is a search.Candidate
    """

    def __init__(self, evaluate: Callable[[C], Any], candidate: C, **limits: Any) -> None:
        self.renew(evaluate, **limits)
        self.candidate = candidate
        self.parent: int | None = None
        self.steps: int | None = None
        self.number = 0
        #: The model's own note on what it belongs to.
        self.mark: Any = None
        #: For the trial, from the model: its scores, and whether it may be the best.
        self.values: tuple[float, ...] = ()
        self.is_feasible = True
        named = candidate if isinstance(candidate, Mapping) else {"candidate": repr(candidate)}
        self.params = dict(named)

    def renew(self, evaluate: Callable[[C], Any], **limits: Any) -> None:
        """Replaces its function and limits by the newest."""
        self._evaluate = evaluate
        vars(self).update({name: getattr(Task, name) for name in LIMITS})
        self.limit_as(evaluate)
        vars(self).update(limits)

    def run(self) -> Any:
        """Calls the function."""
        return self._evaluate(self.candidate)

    def __repr__(self) -> str:
        return f"{getattr(self._evaluate, '__name__', 'evaluate')}({self.candidate!r})"


class _CountedSearch(Model, Generic[C]):
    """The base of the models below: a number of trials; failures are counted, not fatal."""

    def __init__(
        self,
        evaluate: Callable[[C], Any],
        trials: int,
        *,
        seed: int,
        maximize: bool | Sequence[bool],
        **limits: Any,
    ) -> None:
        if not callable(evaluate):
            raise TypeError(f"{type(self).__name__}: evaluate is a function, not {evaluate!r}")
        if trials < 1:
            raise ValueError(f"{type(self).__name__}: at least 1 trial, not {trials}")
        if unknown := limits.keys() - set(LIMITS):
            raise TypeError(f"{type(self).__name__} takes no {', '.join(sorted(unknown))}")
        self._evaluate = evaluate
        self._limits = limits
        options_of(Candidate(evaluate, "a trial", **self._limits))  # checks the limits
        self.seed = seed
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._identity: dict[str, str] = {}
        self._note(function=evaluate, seed=seed, maximize=maximize)
        #: Whether more is better, for each objective.
        self.directions = [maximize] if isinstance(maximize, bool) else list(maximize)
        self.maximize = self.directions[0]
        self.total = trials
        self._asked = 0
        #: All that was ever enqueued, and how many of these were asked for.
        self._enqueued: list[C] = []
        self._taken = 0
        #: Attributes of the next task, which `propose` may set, and of one that begins from
        #: nothing.
        self._marks: Mapping[str, Any] = {}
        self._first_marks: Mapping[str, Any] = {}

    def enqueue(self, candidate: C) -> None:
        """Queues a candidate, as the next of the trials; `OptunaSearch` takes values by name.

        Call it before `search.run`. A search that goes on from a folder does not repeat candidates;
        new ones come after those of the earlier call.
        """
        self._enqueued.append(candidate)

    def ask(self) -> "Candidate[C] | None":
        if self._asked >= self.total:
            return None
        self._marks = self._first_marks
        candidate = self._next()
        self._asked += 1
        task = Candidate(self._evaluate, candidate, **self._limits)
        vars(task).update(self._marks)
        return task

    def _next(self) -> C:
        """Returns enqueued candidates first, and then its own."""
        if self._taken < len(self._enqueued):
            self._taken += 1
            return self._enqueued[self._taken - 1]
        return self.propose()

    def _note(self, **settings: object) -> None:
        """Adds settings to its identity, without addresses of objects, which change."""
        for name, each in settings.items():
            text = name_of(each) if callable(each) else re.sub(" at 0x[0-9a-f]+", "", repr(each))
            self._identity[name] = text

    def identity(self) -> dict[str, str]:
        return self._identity

    def resumed(self, given: Model, outstanding: Sequence["Candidate[C]"]) -> None:
        """As `Model.resumed`; takes over functions, also those without a name."""
        super().resumed(given, outstanding)
        for name, each in vars(given).items():
            if isinstance(each, types.FunctionType) or name in _RENEWED:
                setattr(self, name, each)
        for task in outstanding:
            task.renew(self._evaluate, **self._limits)

    def propose(self) -> C:
        """Returns the next candidate."""
        raise NotImplementedError

    def tell(self, task: "Candidate[C]", result: Any) -> None:
        task.values = self._values_of(task, result)
        self.learn(task, self._fitness(task.values[0] if task.values else None))

    def _values_of(self, task: "Candidate[C]", result: Any) -> tuple[float, ...]:
        """Returns a number for each objective; none, if one of them is NaN."""
        needed, results = f"{len(self.directions)} numbers", result
        if len(self.directions) == 1:
            needed, score = "a number, or a tuple that begins with one", self.score(result)
            results = [result if score is None else score]
        numbers = [number_of(each) for each in results] if hasattr(results, "__iter__") else []
        values = [each for each in numbers if each is not None]
        if not len(values) == len(numbers) == len(self.directions):
            raise SearchError(f"{task!r} returned {result!r}; this search needs {needed}")
        return () if any(map(math.isnan, values)) else tuple(values)

    def _fitness(self, value: float | None) -> float:
        """Returns the fitness for a value; NaN, of training that diverged, is the worst."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.maximize else -value

    def learn(self, task: "Candidate[C]", fitness: float) -> None:
        """Takes note of how fit a candidate is; more is better."""

    def stopped(self, task: "Candidate[C]", value: float | None) -> None:
        if self.needs_folder:
            self.learn(task, -math.inf)  # it may have written no checkpoint
        elif value is not None:
            self.learn(task, self._fitness(value))


class RandomSearch(_CountedSearch[C]):
    """Tries candidates that a function draws.

    Example:
        def sample(rng):
            return {"rate": 10 ** rng.uniform(-5, -1), "width": rng.choice([64, 128])}

        search.run(search.RandomSearch(train, sample, trials=100))
    """

    def __init__(
        self,
        evaluate: Callable[[C], Any],
        sample: Callable[[random.Random], C],
        trials: int,
        *,
        seed: int = 0,
        maximize: bool | Sequence[bool] = True,
        **limits: Any,
    ) -> None:
        """Describes the search.

        Args:
            evaluate: Returns how good a candidate is: a number, or a tuple that begins with one.
                Runs in workers.
            sample: Draws a candidate.
            trials: How many are tried.
            seed: Of what is drawn.
            maximize: Whether more is better. With several objectives, whether it is for each, as in
                `[True, False]`: `evaluate` returns as many numbers, and `result.best_trials` has the best.
            **limits: Of each trial: `retries`, `timeout_s`, `cpus` and the others of `search.needs`.
        """
        super().__init__(evaluate, trials, seed=seed, maximize=maximize, **limits)
        self._note(sample=sample)
        self._sample = sample

    def propose(self) -> C:
        """Draws a candidate."""
        return self._sample(self._random)


class GridSearch(_CountedSearch[dict[str, Any]]):
    """Tries all points of a grid, each once, in the order of the lists; the last name changes fastest.

    A grid has a list of values for each parameter, or again a dict. Of a list of grids, it tries one after
    the other, as of `[{"opt": ["sgd"], "momentum": [0.8, 0.9]}, {"opt": ["adam"]}]`.

    Example:
        grid = {"rate": [0.1, 0.01], "layers": {"width": [64, 128], "depth": range(2, 5)}}
        search.run(search.GridSearch(train, grid))  # train({"rate": 0.1, "layers": {"width": 64, ..
    """

    def __init__(
        self,
        evaluate: Callable[[dict[str, Any]], Any],
        grid: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        maximize: bool | Sequence[bool] = True,
        **limits: Any,
    ) -> None:
        """Describes the search; other arguments as for `RandomSearch`.

        Raises:
            TypeError: The values of a parameter are no list.
            ValueError: There is no point.
        """
        grids = [grid] if isinstance(grid, Mapping) else grid
        points = [point for each in grids for point in _points_of(each)]
        self._points: collections.deque[dict[str, Any]] = collections.deque(points)
        super().__init__(evaluate, len(points), seed=0, maximize=maximize, **limits)
        self._note(grid=grid)

    def enqueue(self, candidate: dict[str, Any]) -> None:
        """As for `RandomSearch`, but besides the points of the grid."""
        super().enqueue(candidate)
        self.total += 1

    def propose(self) -> dict[str, Any]:
        """Returns the next point."""
        return self._points.popleft()


def _points_of(grid: Any) -> Iterator[Any]:
    """Yields the points of a grid, or the values of a parameter."""
    if isinstance(grid, str) or not hasattr(grid, "__getitem__"):
        raise TypeError(f"GridSearch: a parameter has a list of values, or a dict, not {grid!r}")
    if not isinstance(grid, Mapping):
        yield from grid
        return
    for values in itertools.product(*map(_points_of, grid.values())):
        yield dict(zip(grid, values, strict=True))


class _Evolution(RandomSearch[C]):
    """The base of those that make candidates of good ones."""

    #: Those that candidates are made of, with their fitness.
    _living: MutableSequence[tuple[float, C]]

    def __init__(self, *of_search: Any, population: int, tournament: int, **options: Any) -> None:
        super().__init__(*of_search, **options)
        self._note(population=population, tournament=tournament)
        if not 1 <= tournament <= population:
            raise ValueError(
                f"{type(self).__name__}: 1 to {population} (the population) take part in a tournament, "
                f"not {tournament}"
            )
        self._tournament = tournament
        self._first = population

    def _parent(self) -> C:
        drawn = self._random.sample(self._living, min(self._tournament, len(self._living)))
        return max(drawn, key=lambda each: each[0])[1]


class RegularizedEvolution(_Evolution[C]):
    """Mutates the best of a few, and removes the oldest.

    Real et al., "Regularized Evolution for Image Classifier Architecture Search" (AAAI 2019).

    Example:
        def mutate(params, rng):
            return {"rate": params["rate"] * rng.uniform(0.5, 2)}

        search.run(search.RegularizedEvolution(train, sample, mutate, trials=1000), workers=8)
    """

    def __init__(
        self,
        evaluate: Callable[[C], Any],
        sample: Callable[[random.Random], C],
        mutate: Callable[[C, random.Random], C],
        trials: int,
        *,
        population: int = 50,
        tournament: int = 10,
        seed: int = 0,
        maximize: bool = True,
        **limits: Any,
    ) -> None:
        """Describes the search; other arguments as for `RandomSearch`.

        `sample` draws the first candidates, `mutate` returns a new one that differs a little. Of
        `population` candidates, `tournament` are drawn, and the best of these is mutated.

        Raises:
            ValueError: The tournament is empty, or larger than the population.
        """
        own = {"population": population, "tournament": tournament}
        super().__init__(evaluate, sample, trials, seed=seed, maximize=maximize, **own, **limits)
        self._note(mutate=mutate)
        self._mutate = mutate
        self._living = collections.deque(maxlen=population)

    def propose(self) -> C:
        """Draws one of the first candidates, or mutates a good one."""
        if self._asked < self._first or not self._living:
            return super().propose()
        return self._mutate(self._parent(), self._random)

    def learn(self, task: Candidate[C], fitness: float) -> None:
        """Takes note of how fit a candidate is."""
        self._living.append((fitness, task.candidate))


class Genome(Protocol):
    """A candidate of variable length, which can be recombined with another one.

    Example:
        class Layers(tuple):  # a search.Genome
            def mutate(self, rng):
                return Layers((*self, rng.choice(["3x3", "5x5"])))

            def crossover(self, other, rng):
                return Layers(self[:1] + other[1:]), Layers(other[:1] + self[1:])
    """

    def __len__(self) -> int:
        """Returns its length."""

    def mutate(self, rng: random.Random) -> Any:
        """Returns one that may differ."""

    def crossover(self, other: Any, rng: random.Random) -> Sequence[Any]:
        """Returns two combinations of both."""


G = TypeVar("G", bound=Genome)


class VariableLengthEvolution(_Evolution[G]):
    """Recombines two good candidates if they have the same length; else mutates them.

    Algorithm 1 of Hajewski and Oliveira, "Building Scalable Deep Learning Systems with RPC". Where
    two parents of different lengths are mutated, both children are tried, and the fitter one is
    kept.

    Example:
        def first(rng):
            return Layers([rng.choice(["3x3", "5x5"])])  # a search.Genome

        search.run(search.VariableLengthEvolution(train, first, trials=1000), workers=8)
    """

    def __init__(
        self,
        evaluate: Callable[[G], Any],
        sample: Callable[[random.Random], G],
        trials: int,
        *,
        population: int = 20,
        tournament: int = 3,
        seed: int = 0,
        maximize: bool = True,
        **limits: Any,
    ) -> None:
        """Describes the search; arguments as for `RegularizedEvolution`. The least fit ones go."""
        own = {"population": population, "tournament": tournament}
        super().__init__(evaluate, sample, trials, seed=seed, maximize=maximize, **own, **limits)
        self._living = []
        #: Children that are to be tried; of two with the same number only the fitter one is kept.
        self._children: collections.deque[tuple[G, int | None]] = collections.deque()
        self._pairs = itertools.count()
        #: By number, the first of a pair that has ended.
        self._first_of_pair: dict[int, tuple[float, G]] = {}

    def propose(self) -> G:
        """Draws one of the first candidates, or makes a child of good ones."""
        if not self._children:
            self._breed()
        child, pair = self._children.popleft()
        self._marks = {"mark": pair}
        return child

    def _breed(self) -> None:
        if self._asked < self._first or len(self._living) < 2:
            self._children.append((super().propose(), None))
            return
        one, other = self._parent(), self._parent()
        if len(one) != len(other):
            pair = next(self._pairs)
            for parent in (one, other):
                self._children.append((parent.mutate(self._random), pair))
        else:
            for child in one.crossover(other, self._random):
                self._children.append((child.mutate(self._random), None))

    def learn(self, task: Candidate[G], fitness: float) -> None:
        """Takes note of how fit a candidate is."""
        fitter = fitness, task.candidate
        if task.mark is not None:
            if task.mark not in self._first_of_pair:
                self._first_of_pair[task.mark] = fitter
                return
            fitter = max(fitter, self._first_of_pair.pop(task.mark), key=lambda each: each[0])
        if fitter[0] == -math.inf:
            return
        self._living.append(fitter)
        if len(self._living) > self._first:
            self._living.remove(min(self._living, key=lambda each: each[0]))

    def fail(self, task: Candidate[G], error: FailedTaskError) -> None:
        """As `Model.fail`."""
        super().fail(task, error)
        if task.mark is not None:
            self.learn(task, -math.inf)


class SuccessiveHalving(RandomSearch[C]):
    """Stops candidates that are not among the best at a rung; asynchronously, so no trial waits.

    ASHA: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020). By
        default it stops trials: `evaluate` calls `search.report(value)` after each step.

    With `promote=True`, each rung of a candidate is a trial. The best at a rung go on from their
    checkpoints, the others end. `evaluate` trains from `search.current_trial().parent`, or from
    nothing if that is None, until it has made `steps` in all, and writes a checkpoint to `folder`.

    Example:
        def train(params):
            for epoch in range(81):
                search.report(accuracy := train_epoch(params))
            return accuracy

        search.run(search.SuccessiveHalving(train, sample, trials=1000), workers=8)
    """

    def __init__(
        self,
        evaluate: Callable[[C], Any],
        sample: Callable[[random.Random], C],
        trials: int,
        *,
        first_rung: int = 1,
        reduction: int = 3,
        promote: bool = False,
        last_rung: float = math.inf,
        seed: int = 0,
        maximize: bool = True,
        **limits: Any,
    ) -> None:
        """Describes the search; other arguments as for `RandomSearch`.

        `evaluate` reports its progress. Each candidate may make `first_rung` steps. One in `reduction`
        goes on at a rung, and the next rung is as many times as far. With `promote`, candidates go on
        from checkpoints, so the search needs a folder; `trials` counts continuations, and no candidate
        makes more than `last_rung` steps.

        Raises:
            ValueError: The first rung is before the first step, or no trial would be stopped.
        """
        super().__init__(evaluate, sample, trials, seed=seed, maximize=maximize, **limits)
        self._note(first_rung=first_rung, reduction=reduction, promote=promote)
        if first_rung < 1 or reduction < 2:
            raise ValueError(
                "SuccessiveHalving: first_rung is at least 1 and reduction at least 2, not "
                f"{first_rung} and {reduction}"
            )
        self.needs_folder = promote
        self._first_marks = {"steps": first_rung} if promote else {}
        self._first_rung = first_rung
        self._reduction = reduction
        self._last_rung = last_rung
        #: By steps, the fitness and numbers of all that got there.
        self._rungs: dict[int, list[tuple[float, int]]] = {}
        #: Candidates that may go on, by number.
        self._waiting: dict[int, C] = {}

    def propose(self) -> C:
        """Continues a candidate at the highest rung where one may go on, or draws a new one."""
        for steps in sorted(self._rungs, reverse=True) if self._waiting else ():
            rung, further = self._rungs[steps], steps * self._reduction
            best = rung[len(rung) - len(rung) // self._reduction :]
            waiting = [number for _, number in best if number in self._waiting]
            if waiting and further <= self._last_rung:
                self._marks = {"parent": waiting[-1], "steps": further}
                return self._waiting.pop(waiting[-1])
        return super().propose()

    def learn(self, task: Candidate[C], fitness: float) -> None:
        """Takes note of how fit a candidate is at its rung."""
        if task.steps is not None:
            bisect.insort(self._rungs.setdefault(task.steps, []), (fitness, task.number))
            if fitness > -math.inf:
                self._waiting[task.number] = task.candidate

    def report(self, task: Candidate[C], step: int, value: float) -> bool:
        """As `Model.report`."""
        steps, next_rung = step + 1, self._first_rung
        while next_rung < steps:
            next_rung *= self._reduction
        if self.needs_folder or steps != next_rung:
            return False
        fitness = self._fitness(value)
        rung = self._rungs.setdefault(steps, [])
        bisect.insort(rung, (fitness, task.number))
        kept = max(1, len(rung) // self._reduction)
        return fitness == -math.inf or fitness < rung[-kept][0]


@dataclass(eq=False)
class _Individual:
    """One of a population."""

    rounds: int = 0
    is_busy: bool = False
    #: The candidate and the trial of its last good round.
    candidate: Any = None
    parent: int | None = None
    #: Of its newest round; -inf: it has failed.
    fitness: float | None = None


class PopulationBasedTraining(RandomSearch[C]):
    """Trains a population in rounds; the worst members go on from the checkpoints of good ones.

    Jaderberg et al., "Population Based Training of Neural Networks" (2017), with truncation selection.
    Each round of a member is a trial: `evaluate` trains from `search.current_trial().parent`, or
    from nothing if that is None, and writes a checkpoint to `folder`. A member is compared with the
    newest finished rounds of the others, so no member waits for a slow one. If a round fails, its
    member goes on from a good one.

    Example:
        def perturb(params, rng):
            return {"rate": params["rate"] * rng.choice([0.8, 1.2])}

        model = search.PopulationBasedTraining(train, sample, perturb, population=20, rounds=10)
        search.run(model, workers=8, folder="runs/1")
    """

    needs_folder = True

    def __init__(
        self,
        evaluate: Callable[[C], Any],
        sample: Callable[[random.Random], C],
        perturb: Callable[[C, random.Random], C],
        *,
        population: int,
        rounds: int,
        quantile: float = 0.2,
        seed: int = 0,
        maximize: bool = True,
        **limits: Any,
    ) -> None:
        """Describes the search, of `population * rounds` trials; other arguments as for `RandomSearch`.

        `perturb` returns a new candidate that differs a little, for a member that goes on from
        another one. The worst `quantile` of the population are replaced by as many of the best.

        Raises:
            ValueError: The population has less than 2 members, or the quantile is above a half.
        """
        if population < 2 or not 0 < quantile <= 0.5:
            raise ValueError(
                f"PopulationBasedTraining: at least 2 members, not {population}; the quantile is above 0 and "
                f"at most 0.5, not {quantile}"
            )
        trials = population * rounds
        super().__init__(evaluate, sample, trials, seed=seed, maximize=maximize, **limits)
        self._note(perturb=perturb, population=population, quantile=quantile)
        self._perturb = perturb
        self._rounds = rounds
        self._count = max(1, int(population * quantile))
        self._members = [_Individual() for _ in range(population)]

    def ask(self) -> Candidate[C] | None:
        """As `Model.ask`: the next round of a member with the fewest."""
        free = [each for each in self._members if not each.is_busy and each.rounds < self._rounds]
        if not free:
            return None
        member = min(free, key=lambda each: each.rounds)
        member.rounds, member.is_busy = member.rounds + 1, True
        source = self._source_of(member)
        if source.parent is None:
            candidate = self._next()
        elif source is member:
            candidate = member.candidate
        else:
            candidate = self._perturb(source.candidate, self._random)
        task = Candidate(self._evaluate, candidate, **self._limits)
        task.mark, task.parent = self._members.index(member), source.parent
        return task

    def _source_of(self, member: _Individual) -> _Individual:
        """Returns the member whose checkpoint one uses: its own, unless it is one of the worst."""
        ranked = [each for each in self._members if each.fitness is not None]
        ranked.sort(key=lambda each: each.fitness or 0.0)
        best = ranked[-self._count :]
        good = [each for each in best if each.fitness != -math.inf]
        is_replaced = good and member in ranked[: self._count] and member not in best
        return self._random.choice(good) if is_replaced else member

    def learn(self, task: Candidate[C], fitness: float) -> None:
        """Takes note of how fit a member is."""
        member = self._members[task.mark]
        member.is_busy, member.fitness = False, fitness
        if fitness > -math.inf:
            member.candidate, member.parent = task.candidate, task.number

    def fail(self, task: Candidate[C], error: FailedTaskError) -> None:  # noqa: ARG002
        """As `Model.fail`."""
        self.learn(task, -math.inf)


class OptunaSearch(_CountedSearch[dict[str, Any]]):
    """Tries what a study of Optuna asks for, with its samplers and pruners.

    Only this model uses the study, so any storage will do. `result.model.study` has the trials; so
    has that of the script, if the study is stored. Needs `launchpad-lite[optuna]`.

    Example:
        study = optuna.create_study(direction="maximize", pruner=optuna.pruners.HyperbandPruner())
        space = {"rate": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)}
        search.run(search.OptunaSearch(study, space, train, trials=100))
    """

    def __init__(
        self,
        study: Any,
        space: Mapping[str, Any] | Callable[[Any], dict[str, Any]],
        evaluate: Callable[[dict[str, Any]], Any],
        trials: int,
        **limits: Any,
    ) -> None:
        """Describes the search.

        Args:
            study: An `optuna.Study`. With several objectives, `evaluate` returns as many numbers, and
                `result.best_trials` has the best trials.
            space: A distribution of Optuna for each parameter; or a function that takes an `optuna.Trial`,
                calls its `suggest_float`, `suggest_int` and `suggest_categorical`, under any conditions, and
                returns the parameters, also nested. It runs in the node of the model.
            evaluate: Returns how good parameters are. Runs in workers, which need no Optuna.
                `search.report(value)` replaces `trial.report` and `trial.should_prune`.
            trials: How many are tried.
            **limits: Of each trial: `retries`, `timeout_s`, `cpus` and the others of `search.needs`.

        Raises:
            MissingExtraError: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError:
            raise MissingExtraError(
                "OptunaSearch needs Optuna. Run: pip install 'launchpad-lite[optuna]'"
            ) from None
        more = [each == optuna.study.StudyDirection.MAXIMIZE for each in study.directions]
        super().__init__(evaluate, trials, seed=0, maximize=more, **limits)
        noted = space if callable(space) else dict(sorted(space.items()))
        self._note(sampler=type(study.sampler), space=noted)
        self.study = study
        self._space = space
        #: Whether its sampler has tried all points.
        self._is_exhausted = False
        #: Outstanding candidates, by their numbers in Optuna.
        self._trials: dict[int, Any] = {}

    def resumed(self, given: Model, outstanding: Sequence[Candidate[dict[str, Any]]]) -> None:
        """As `Model.resumed`. In a stored study, marks trials lost by a kill as failed."""
        from optuna.trial import TrialState

        super().resumed(given, outstanding)
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.number not in self._trials:
                self._tell(trial.number, None, "FAIL")

    def done(self) -> bool:
        """As `Model.done`: a grid may end before its number of trials."""
        return self._is_exhausted

    def _next(self) -> dict[str, Any]:
        if self._taken < len(self._enqueued):
            self.study.enqueue_trial(super()._next())
        return self.propose()

    def propose(self) -> dict[str, Any]:
        """Asks the study."""
        space = self._space
        trial = self.study.ask(None if callable(space) else space)
        self._marks = {"mark": trial.number}
        self._trials[trial.number] = trial
        return space(trial) if callable(space) else dict(trial.params)

    def tell(self, task: Candidate[dict[str, Any]], result: Any) -> None:
        """As `Model.tell`."""
        task.values = self._values_of(task, result)
        if not task.values:
            self._end(task, None, "FAIL")
            return
        told = self._end(task, list(task.values))
        task.is_feasible = all(each <= 0 for each in told.system_attrs.get("constraints") or ())

    def report(self, task: Candidate[dict[str, Any]], step: int, value: float) -> bool:
        """As `Model.report`."""
        trial = self._trials[task.mark]
        if len(self.directions) > 1:
            return False  # Optuna prunes with one objective only
        trial.report(value, step)
        return bool(trial.should_prune())

    def stopped(
        self,
        task: Candidate[dict[str, Any]],
        value: float | None,  # noqa: ARG002 - Optuna has it as what was reported
    ) -> None:
        """As `Model.stopped`."""
        self._end(task, None, "PRUNED")

    def fail(self, task: Candidate[dict[str, Any]], error: FailedTaskError) -> None:  # noqa: ARG002
        """As `Model.fail`."""
        self._end(task, None, "FAIL")

    def _end(self, task: Candidate[dict[str, Any]], values: Any, state: str = "COMPLETE") -> Any:
        self._trials.pop(task.mark, None)
        return self._tell(task.mark, values, state)

    def _tell(self, number: int, values: Any, state: str) -> Any:
        """Ends a trial of the study unless it has ended: a study may be newer than a checkpoint."""
        from optuna.trial import TrialState

        try:
            return self.study.tell(number, values, TrialState[state], skip_if_finished=True)
        except RuntimeError as error:
            if "Study.stop" not in str(error):
                raise
            self._is_exhausted = True  # it was told, and the sampler asks to end
            return self.study.get_trials(deepcopy=False)[number]
