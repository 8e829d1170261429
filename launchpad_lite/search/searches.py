"""Models that are ready to use: random search, evolution, early stopping, samplers of Optuna."""

import bisect
import collections
import itertools
import math
import random
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from launchpad_lite.errors import MissingExtraError
from launchpad_lite.search.errors import FailedTaskError, SearchError
from launchpad_lite.search.models import Model, name_of, number_of
from launchpad_lite.search.tasks import LIMITS, Task, options_of

__all__ = [
    "Candidate",
    "Genome",
    "OptunaSearch",
    "RandomSearch",
    "RegularizedEvolution",
    "SuccessiveHalving",
    "VariableLengthEvolution",
]

C = TypeVar("C")


class Candidate(Task, Generic[C]):
    """Says how good a candidate is: a call of the user's function.

    Attributes:
        candidate: What is tried.
        parent: Number of the trial whose folder it goes on from; None: it begins anew.

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
        #: For the model that asked for it.
        self.pair: int | None = None
        self.number = 0
        #: For the trial, from the model: its scores if there are several, and whether it may be the best.
        self.values: tuple[float, ...] = ()
        self.is_feasible = True
        named = candidate if isinstance(candidate, Mapping) else {"candidate": repr(candidate)}
        self.params = dict(named)

    def renew(self, evaluate: Callable[[C], Any], **limits: Any) -> None:
        """Has it call another function within other limits, in place of an earlier version."""
        self._evaluate = evaluate
        vars(self).update(limits)

    def run(self) -> Any:
        """Calls the function."""
        return self._evaluate(self.candidate)

    def __repr__(self) -> str:
        return f"{getattr(self._evaluate, '__name__', 'evaluate')}({self.candidate!r})"


class _Search(Model, Generic[C]):
    """What the models below share: so many trials, and failures that are counted, not fatal."""

    def __init__(
        self,
        evaluate: Callable[[C], Any],
        trials: int,
        *,
        seed: int,
        maximize: bool,
        **limits: Any,
    ) -> None:
        if not callable(evaluate):
            raise TypeError(f"{type(self).__name__}: evaluate is a function, not {evaluate!r}")
        if trials < 1:
            raise ValueError(f"{type(self).__name__}: at least 1 trial, not {trials}")
        if unknown := limits.keys() - set(LIMITS):
            raise TypeError(f"{type(self).__name__} takes no {', '.join(sorted(unknown))}")
        self._evaluate = evaluate
        self._limits = {name: getattr(Task, name) for name in LIMITS} | limits
        options_of(Candidate(evaluate, "a trial", **self._limits))  # refuses what makes no sense
        self.seed = seed
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._identity: dict[str, str] = {}
        self._note(function=evaluate, seed=seed, maximize=maximize)
        self.maximize = maximize
        self.total = trials
        self._asked = 0

    def ask(self) -> "Candidate[C] | None":
        """As `Model.ask`."""
        if self._asked >= self.total:
            return None
        candidate = self.propose()
        self._asked += 1
        return Candidate(self._evaluate, candidate, **self._limits)

    def _note(self, **settings: object) -> None:
        """Makes settings a part of its identity."""
        for name, each in settings.items():
            self._identity[name] = name_of(each) if callable(each) else repr(each)

    def identity(self) -> dict[str, str]:
        """As `Model.identity`."""
        return self._identity

    def resumed(self, given: Model, outstanding: Sequence["Candidate[C]"]) -> None:
        """As `Model.resumed`; takes over functions, also those without a name."""
        super().resumed(given, outstanding)
        for name, each in vars(given).items():
            if isinstance(each, types.FunctionType) or name in ("_evaluate", "_limits", "_space"):
                setattr(self, name, each)
        for task in outstanding:
            task.renew(self._evaluate, **self._limits)

    def propose(self) -> C:
        """Returns what is tried next."""
        raise NotImplementedError

    def tell(self, task: "Candidate[C]", result: Any) -> None:
        """As `Model.tell`."""
        score = self.score(result)
        if score is None and number_of(result) is None:
            raise SearchError(
                f"{task!r} returned {result!r}; a search needs a number, or a tuple that begins with one"
            )
        self.learn(task, self._fitness(score))

    def _fitness(self, value: float | None) -> float:
        """Returns how fit who reached a value is; NaN, of training that diverged, is the worst."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.maximize else -value

    def learn(self, task: "Candidate[C]", fitness: float) -> None:
        """Takes note of how fit a candidate is; more is better."""

    def stopped(self, task: "Candidate[C]", value: float | None) -> None:
        """As `Model.stopped`."""
        if value is not None:
            self.learn(task, self._fitness(value))


class RandomSearch(_Search[C]):
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
        maximize: bool = True,
        **limits: Any,
    ) -> None:
        """Describes the search.

        Args:
            evaluate: Returns how good a candidate is: a number, or a tuple that begins with one.
                Runs in workers.
            sample: Draws a candidate.
            trials: How many are tried.
            seed: Of what is drawn.
            maximize: Whether more is better.
            **limits: Of each trial: `retries`, `timeout_s`, `progress_timeout_s`, `memory_bytes`, as of `Task`.
        """
        super().__init__(evaluate, trials, seed=seed, maximize=maximize, **limits)
        self._note(sample=sample)
        self._sample = sample

    def propose(self) -> C:
        """Draws a candidate."""
        return self._sample(self._random)


class RegularizedEvolution(_Search[C]):
    """Mutates the best of a few, and lets the oldest die.

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
        """Describes the search.

        Args:
            evaluate: As for `RandomSearch`.
            sample: Draws one of the first candidates.
            mutate: Returns a new candidate that differs a little.
            trials: As for `RandomSearch`.
            population: How many live at a time.
            tournament: How many of them are drawn, of which the best one is mutated.
            seed: As for `RandomSearch`.
            maximize: As for `RandomSearch`.
            **limits: As for `RandomSearch`.

        Raises:
            ValueError: The tournament is empty, or larger than the population.
        """
        super().__init__(evaluate, trials, seed=seed, maximize=maximize, **limits)
        self._note(sample=sample, mutate=mutate, population=population, tournament=tournament)
        if not 1 <= tournament <= population:
            raise ValueError(
                f"RegularizedEvolution: 1 to {population} (the population) take part in a tournament, "
                f"not {tournament}"
            )
        self._sample = sample
        self._mutate = mutate
        self._tournament = tournament
        self._first = population
        self._living: collections.deque[tuple[float, C]] = collections.deque(maxlen=population)

    def propose(self) -> C:
        """Draws one of the first candidates, or mutates a good one."""
        if self._asked < self._first or not self._living:
            return self._sample(self._random)
        drawn = self._random.sample(self._living, min(self._tournament, len(self._living)))
        _, parent = max(drawn, key=lambda each: each[0])
        return self._mutate(parent, self._random)

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
        """Returns two that are made of parts of both."""


G = TypeVar("G", bound=Genome)


class VariableLengthEvolution(_Search[G]):
    """Recombines two good candidates of the same length, and mutates them else.

    Algorithm 1 of Hajewski and Oliveira, "Building Scalable Deep Learning Systems with RPC". Where
    two parents of different lengths are mutated, both children are tried, and the fitter one lives.

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
        """Describes the search; arguments as for `RegularizedEvolution`. The least fit ones die."""
        super().__init__(evaluate, trials, seed=seed, maximize=maximize, **limits)
        self._note(sample=sample, population=population, tournament=tournament)
        if not 1 <= tournament <= population:
            raise ValueError(
                f"VariableLengthEvolution: 1 to {population} (the population) take part in a "
                f"tournament, not {tournament}"
            )
        self._sample = sample
        self._tournament = tournament
        self._first = population
        self._living: list[tuple[float, G]] = []
        #: Children that are to be tried; of two with the same number only the fitter one will live.
        self._children: collections.deque[tuple[G, int | None]] = collections.deque()
        self._pairs = itertools.count()
        #: By number, the first of a pair that has ended.
        self._first_of_pair: dict[int, tuple[float, G]] = {}

    def ask(self) -> Candidate[G] | None:
        """As `Model.ask`."""
        task = super().ask()
        if task is not None:
            task.pair = self._pair
        return task

    def propose(self) -> G:
        """Draws one of the first candidates, or makes a child of good ones."""
        if not self._children:
            self._breed()
        child, self._pair = self._children.popleft()
        return child

    def _breed(self) -> None:
        if self._asked < self._first or len(self._living) < 2:
            self._children.append((self._sample(self._random), None))
            return
        one, other = self._parent(), self._parent()
        if len(one) != len(other):
            pair = next(self._pairs)
            for parent in (one, other):
                self._children.append((parent.mutate(self._random), pair))
        else:
            for child in one.crossover(other, self._random):
                self._children.append((child.mutate(self._random), None))

    def _parent(self) -> G:
        drawn = self._random.sample(self._living, min(self._tournament, len(self._living)))
        return max(drawn, key=lambda each: each[0])[1]

    def learn(self, task: Candidate[G], fitness: float) -> None:
        """Takes note of how fit a candidate is."""
        fitter = fitness, task.candidate
        if task.pair is not None:
            if task.pair not in self._first_of_pair:
                self._first_of_pair[task.pair] = fitter
                return
            fitter = max(fitter, self._first_of_pair.pop(task.pair), key=lambda each: each[0])
        if fitter[0] == -math.inf:
            return
        self._living.append(fitter)
        if len(self._living) > self._first:
            self._living.remove(min(self._living, key=lambda each: each[0]))

    def fail(self, task: Candidate[G], error: FailedTaskError) -> None:
        """As `Model.fail`."""
        super().fail(task, error)
        if task.pair is not None:
            self.learn(task, -math.inf)


class SuccessiveHalving(_Search[C]):
    """Stops those early that are not among the best at a rung; asynchronously, so nobody waits.

    ASHA, in the variant that stops: Li et al., "A System for Massively Parallel Hyperparameter
    Tuning" (MLSys 2020). `evaluate` calls `search.report(value)` after each step.

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
        seed: int = 0,
        maximize: bool = True,
        **limits: Any,
    ) -> None:
        """Describes the search.

        Args:
            evaluate: As for `RandomSearch`; reports its progress.
            sample: Draws a candidate.
            trials: As for `RandomSearch`.
            first_rung: Steps that each candidate may make.
            reduction: One in so many goes on at a rung; the next rung is as many times as far.
            seed: As for `RandomSearch`.
            maximize: As for `RandomSearch`.
            **limits: As for `RandomSearch`.

        Raises:
            ValueError: The first rung is before the first step, or nobody would be stopped.
        """
        super().__init__(evaluate, trials, seed=seed, maximize=maximize, **limits)
        self._note(sample=sample, first_rung=first_rung, reduction=reduction)
        if first_rung < 1 or reduction < 2:
            raise ValueError(
                "SuccessiveHalving: first_rung is at least 1 and reduction at least 2, not "
                f"{first_rung} and {reduction}"
            )
        self._sample = sample
        self._first_rung = first_rung
        self._reduction = reduction
        #: What all that got there had reported, by steps.
        self._rungs: dict[int, list[float]] = {}

    def propose(self) -> C:
        """Draws a candidate."""
        return self._sample(self._random)

    def report(self, task: Candidate[C], step: int, value: float) -> bool:  # noqa: ARG002
        """As `Model.report`."""
        steps = step + 1
        if not self._is_rung(steps):
            return False
        fitness = self._fitness(value)
        rung = self._rungs.setdefault(steps, [])
        bisect.insort(rung, fitness)
        kept = max(1, len(rung) // self._reduction)
        return fitness == -math.inf or fitness < rung[-kept]

    def _is_rung(self, steps: int) -> bool:
        rung = self._first_rung
        while rung < steps:
            rung *= self._reduction
        return rung == steps


class OptunaSearch(_Search[dict[str, Any]]):
    """Tries what a study of Optuna asks for; its samplers and pruners do what they do there.

    Only this model uses the study, so any storage will do. What it fills is `result.model.study`; if the
    study is stored, that of the script, too. Needs `launchpad-lite[optuna]`.

    Example:
        study = optuna.create_study(direction="maximize", pruner=optuna.pruners.HyperbandPruner())
        space = {"rate": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)}
        search.run(search.OptunaSearch(study, space, train, trials=100))
    """

    def __init__(
        self,
        study: Any,
        space: Mapping[str, Any],
        evaluate: Callable[[dict[str, Any]], float],
        trials: int,
        **limits: Any,
    ) -> None:
        """Describes the search.

        Args:
            study: An `optuna.Study`. With several objectives, `evaluate` returns as many numbers, and
                `result.best_trials` has the best trials.
            space: A distribution of Optuna for each parameter.
            evaluate: Returns how good parameters are. Runs in workers, which need no Optuna.
                `search.report(value)` is what `trial.report` and `trial.should_prune` are there.
            trials: How many are tried.
            **limits: Of each trial: `retries`, `timeout_s`, `progress_timeout_s`, `memory_bytes`, as of `Task`.

        Raises:
            MissingExtraError: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError:
            raise MissingExtraError(
                "OptunaSearch needs Optuna. Run: pip install 'launchpad-lite[optuna]'"
            ) from None
        #: Whether more is better, for each objective.
        self.directions = [
            each == optuna.study.StudyDirection.MAXIMIZE for each in study.directions
        ]
        super().__init__(evaluate, trials, seed=0, maximize=self.directions[0], **limits)
        self._note(sampler=type(study.sampler), space=dict(sorted(space.items())))
        self._note(directions=[each.name for each in study.directions])
        self.study = study
        self._space = dict(space)
        #: Whether its sampler has tried all that there is.
        self._is_exhausted = False
        #: Those that are outstanding, by the numbers that Optuna gives them.
        self._trials: dict[int, Any] = {}

    def resumed(self, given: Model, outstanding: Sequence[Candidate[dict[str, Any]]]) -> None:
        """As `Model.resumed`. In a study that is stored, trials that were lost with a kill have failed."""
        from optuna.trial import TrialState

        super().resumed(given, outstanding)
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.number not in self._trials:
                self._tell(trial.number, None, TrialState.FAIL)

    def done(self) -> bool:
        """As `Model.done`: a grid may end before its number of trials."""
        return self._is_exhausted

    def ask(self) -> Candidate[dict[str, Any]] | None:
        """As `Model.ask`."""
        task = super().ask()
        if task is not None:
            task.number = self._newest
        return task

    def propose(self) -> dict[str, Any]:
        """Asks the study."""
        trial = self.study.ask(self._space)
        self._newest = trial.number
        self._trials[trial.number] = trial
        return dict(trial.params)

    def tell(self, task: Candidate[dict[str, Any]], result: Any) -> None:
        """As `Model.tell`."""
        from optuna.trial import TrialState

        are_many = len(self.directions) > 1 and hasattr(result, "__iter__")
        numbers = [number_of(each) for each in (result if are_many else [result])]
        if len(numbers) != len(self.directions) or None in numbers:
            raise SearchError(
                f"{task!r} returned {result!r}; this study needs {len(self.directions)} numbers"
            )
        values = [each for each in numbers if each is not None and not math.isnan(each)]
        if len(values) < len(numbers):
            self._end(task, None, TrialState.FAIL)
            return
        told = self._end(task, values)
        task.values = tuple(values)
        task.is_feasible = all(each <= 0 for each in told.system_attrs.get("constraints") or ())

    def report(self, task: Candidate[dict[str, Any]], step: int, value: float) -> bool:
        """As `Model.report`."""
        trial = self._trials[task.number]
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
        from optuna.trial import TrialState

        self._end(task, None, TrialState.PRUNED)

    def fail(self, task: Candidate[dict[str, Any]], error: FailedTaskError) -> None:  # noqa: ARG002
        """As `Model.fail`."""
        from optuna.trial import TrialState

        self._end(task, None, TrialState.FAIL)

    def _end(self, task: Candidate[dict[str, Any]], values: Any, state: Any = None) -> Any:
        self._trials.pop(task.number, None)
        return self._tell(task.number, values, state)

    def _tell(self, number: int, values: Any, state: Any) -> Any:
        """Ends a trial of the study, unless that has it as ended: it may be newer than a checkpoint."""
        try:
            return self.study.tell(number, values, state, skip_if_finished=True)
        except RuntimeError as error:
            if "Study.stop" not in str(error):
                raise
            self._is_exhausted = True  # it was told, and the sampler asks to end
            return self.study.get_trials(deepcopy=False)[number]
