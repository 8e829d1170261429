"""Evolution strategies: Listings 6 and 10 of the Launchpad paper, with CMA-ES as the strategy.

The evolver holds the search distribution. It asks it for candidates, has the
evaluators compute how fit each of them is, and tells the distribution. The
same seed gives the same result with any number of evaluators, even if some are
lost on the way, or the evolver itself, where the program keeps checkpoints.
"""

import collections
import concurrent.futures
import itertools
import json
import math
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp

#: Generations between two lines of progress.
SHOWN_EVERY = 25

#: How soon a stop is noticed while all evaluators are busy.
_POLL_S = 0.1


# Functions of x, shape (dimension,), to be minimised; the lowest value of each is 0.


def sphere(x: Sequence[float]) -> float:
    """A bowl with its lowest point at 0."""
    return sum(v * v for v in x)


def rosenbrock(x: Sequence[float]) -> float:
    """A long bent valley with its lowest point at (1, ..., 1)."""
    return sum(100 * (after - v * v) ** 2 + (1 - v) ** 2 for v, after in itertools.pairwise(x))


def rastrigin(x: Sequence[float]) -> float:
    """An egg carton: a local minimum near every whole number, the lowest point at 0."""
    return sum(10 + v * v - 10 * math.cos(2 * math.pi * v) for v in x)


FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    function.__name__: function for function in (sphere, rosenbrock, rastrigin)
}


@dataclass(frozen=True)
class Problem:
    """The settings of the search.

    Attributes:
        function: A name in `FUNCTIONS`.
        dimension: How many numbers a candidate has, at least 2.
        seed: Decides what the search tries.
        population: Candidates in each generation, at least 4; doubled when a search gets stuck.
        tolerance: The search ends at a value not above it.
        max_evaluations: It gives up after the generation that reaches them.
    """

    function: str
    dimension: int
    seed: int
    population: int
    tolerance: float
    max_evaluations: int

    def __post_init__(self) -> None:
        if self.function not in FUNCTIONS:
            raise ValueError(f"no function {self.function!r}; there are: {', '.join(FUNCTIONS)}")
        if self.dimension < 2 or self.population < 4:
            raise ValueError("CMA-ES needs at least 2 dimensions and a population of 4")


@dataclass(frozen=True)
class Result:
    """The result.

    Attributes:
        solved: Whether `best_f` is within the tolerance; otherwise the evaluations ran out.
        best_x: The best candidate, shape (dimension,).
        best_f: Its value.
        evaluations: How many candidates were evaluated.
        generations: How often the search distribution was updated.
        lost_calls: Calls that were repeated, as their evaluator had ended.
    """

    solved: bool
    best_x: list[float]
    best_f: float
    evaluations: int
    generations: int
    lost_calls: int


class Search:
    """CMA-ES, restarted with twice the population when it gets stuck.

    Always at the point where `candidates` wait for their fitness. A pickle of it continues exactly
    as the original does, random numbers included.
    """

    def __init__(self, problem: Problem) -> None:
        # Loaded by the evolver only: evaluators start faster without.
        import numpy as np

        self.problem = problem
        # CMA-ES would use the generator of the whole process, which is in no pickle.
        self._rng = np.random.RandomState(problem.seed)
        self.best_x: list[float] = []
        self.best_f = math.inf
        self.evaluations = 0
        self.generations = 0
        #: What CMA-ES wants back when it is told: arrays of shape (dimension,).
        self._asked: list[Any] = []
        self._begin(problem.population)

    @property
    def candidates(self) -> list[list[float]]:
        """What to evaluate next, shape (population, dimension)."""
        return [candidate.tolist() for candidate in self._asked]

    @property
    def solved(self) -> bool:
        """Whether the best value is within the tolerance."""
        return self.best_f <= self.problem.tolerance

    @property
    def over(self) -> bool:
        """Whether nothing is left to be done."""
        return self.solved or self.evaluations >= self.problem.max_evaluations

    def tell(self, fitness: Sequence[float]) -> None:
        """Takes in how fit the candidates are, shape (population,), and finds new ones."""
        self.generations += 1
        self.evaluations += len(fitness)
        self._cma.tell(self._asked, fitness)
        best = min(range(len(fitness)), key=fitness.__getitem__)
        if fitness[best] < self.best_f:
            self.best_x, self.best_f = self._asked[best].tolist(), fitness[best]
        if self._cma.stop():
            self._begin(2 * len(fitness))
        else:
            self._asked = self._cma.ask()

    def result(self, lost_calls: int) -> Result:
        """Returns what was found so far."""
        return Result(
            self.solved, self.best_x, self.best_f, self.evaluations, self.generations, lost_calls
        )

    def _begin(self, population: int) -> None:
        start = self._rng.uniform(-3, 3, self.problem.dimension)
        # -10: no output, and no options from a file in the working directory.
        options = {"popsize": population, "randn": self._rng.randn, "verbose": -10}
        self._cma = import_cma().CMAEvolutionStrategy(start, 1.5, options)
        self._asked = self._cma.ask()


def import_cma() -> Any:
    """Returns the package; imported late, so that this module can be read without it."""
    with warnings.catch_warnings():
        # Without matplotlib it warns that it cannot plot.
        warnings.simplefilter("ignore")
        import cma
    return cma


class Evaluator:
    """Computes how fit candidates are."""

    def __init__(self, function: str, cost_ms: float = 0.0) -> None:
        self._function = FUNCTIONS[function]
        self._cost_ms = cost_ms

    def evaluate(self, candidate: list[float]) -> float:
        """Returns the value of one candidate, shape (dimension,)."""
        # In place of the cost of a real evaluation: a simulation, an episode, a training.
        time.sleep(self._cost_ms / 1000)
        return self._function(candidate)

    def ready(self) -> None:
        """Answers when the evaluator is up."""


class Crowd:
    """Evaluators at work: a free one gets the next candidate, a lost one gets none.

    With `@courier.idempotent` on `evaluate`, courier would send lost calls again automatically: to
    the same evaluator, once it is back. Here another one takes over at once.
    """

    def __init__(
        self, evaluators: Sequence[Evaluator], stop: threading.Event, lost_calls: int = 0
    ) -> None:
        self.lost_calls = lost_calls
        self._stop = stop
        self._free = collections.deque(evaluators)
        # A call waits for its server, so the answer comes when the evaluator is back.
        self._missing: dict[concurrent.futures.Future[None], Evaluator] = {}

    def evaluate(self, candidates: Sequence[list[float]]) -> list[float] | None:
        """Returns the fitness of each candidate in their order; None if the program stops."""
        fitness: dict[int, float] = {}
        waiting = collections.deque(range(len(candidates)))
        calls: dict[concurrent.futures.Future[float], tuple[int, Evaluator]] = {}
        while len(fitness) < len(candidates):
            if self._stop.is_set():
                return None
            while waiting and self._free:
                index, evaluator = waiting.popleft(), self._free.popleft()
                call = courier.submit(evaluator.evaluate, candidates[index])
                calls[call] = index, evaluator
            for done in _first_of([*calls, *self._missing]):
                if done in self._missing:
                    self._welcome(done)
                    continue
                index, evaluator = calls.pop(done)
                try:
                    fitness[index] = done.result()
                except courier.ServerGoneError:
                    # As an evaluation changes nothing, another evaluator may do it again.
                    self.lost_calls += 1
                    waiting.appendleft(index)
                    self._miss(evaluator)
                else:
                    self._free.append(evaluator)
        return [fitness[index] for index in range(len(candidates))]

    def _miss(self, evaluator: Evaluator) -> None:
        self._missing[courier.submit(evaluator.ready)] = evaluator

    def _welcome(self, answer: concurrent.futures.Future[None]) -> None:
        evaluator = self._missing.pop(answer)
        try:
            answer.result()
        except courier.ServerGoneError:
            self._stop.wait(_POLL_S)  # it may fail at once, again and again
            self._miss(evaluator)
        else:
            self._free.append(evaluator)


def _first_of(
    calls: Sequence[concurrent.futures.Future[Any]],
) -> set[concurrent.futures.Future[Any]]:
    return concurrent.futures.wait(calls, _POLL_S, concurrent.futures.FIRST_COMPLETED).done


class Evolver:
    """Searches until the optimum is found or the evaluations are used up."""

    # Handles become clients; annotated with the class they stand for, each call is checked.
    def __init__(
        self, problem: Problem, evaluators: Sequence[Evaluator], output: Path | None = None
    ) -> None:
        self._problem = problem
        self._evaluators = evaluators
        self._output = output
        # Held while the search changes: checkpoints are taken in another thread.
        self._lock = threading.Lock()
        self._search = Search(problem)
        self._lost_calls = 0

    def save(self, folder: Path) -> None:
        """Writes a checkpoint. From any thread, while the search continues."""
        with self._lock:
            state = pickle.dumps((self._search, self._lost_calls))
        (folder / "search.pickle").write_bytes(state)

    def restore(self, folder: Path) -> None:
        """Makes `run` go on from a checkpoint."""
        search, lost_calls = pickle.loads((folder / "search.pickle").read_bytes())
        if search.problem != self._problem:
            raise ValueError(f"this is a search for {search.problem}, not for {self._problem}")
        with self._lock:
            self._search, self._lost_calls = search, lost_calls

    def run(self) -> None:
        """Searches."""
        crowd = Crowd(self._evaluators, lp.stop_event(), self._lost_calls)
        search = self._search
        while not search.over:
            fitness = crowd.evaluate(search.candidates)
            if fitness is None:
                return
            with self._lock:
                search.tell(fitness)
                self._lost_calls = crowd.lost_calls
            if search.generations % SHOWN_EVERY == 0:
                _show_progress(search)
        self._finish(search.result(crowd.lost_calls))

    def _finish(self, result: Result) -> None:
        if self._output is not None:
            self._output.write_text(json.dumps(asdict(result)), encoding="utf-8")
        else:
            print(table(result))


def _show_progress(search: Search) -> None:
    print(
        f"generation {search.generations:5,}   {search.evaluations:7,} evaluations   "
        f"best {search.best_f:.2e}"
    )


def table(result: Result) -> str:
    """Returns the result as a table."""
    rows = {
        "optimum": "reached" if result.solved else "NOT reached: the evaluations ran out",
        "best f(x)": f"{result.best_f:.2e}",
        "best x": " ".join(f"{v:.4f}" for v in result.best_x),
        "evaluations": f"{result.evaluations:,}",
        "generations": f"{result.generations:,}",
        "lost calls": f"{result.lost_calls:,}",
    }
    return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


def make_program(
    num_evaluators: int = 8,
    function: str = "rosenbrock",
    dimension: int = 8,
    seed: int = 1,
    output: Path | None = None,
    *,
    cost_ms: float = 0.0,
    population: int = 16,
    tolerance: float = 1e-8,
    max_evaluations: int = 100_000,
) -> lp.Program:
    """Describes the program; nothing runs yet.

    Args:
        num_evaluators: How many candidates are evaluated at the same time.
        function: What is minimised: a name in `FUNCTIONS`.
        dimension: How many numbers a candidate has.
        seed: Decides what the search tries.
        output: Where the result is written as JSON; None prints it.
        cost_ms: Milliseconds that each evaluation takes besides.
        population: Candidates in each generation, at the beginning.
        tolerance: The search ends at a value not above it; the optimum is 0.
        max_evaluations: It gives up after the generation that reaches them.

    Raises:
        ValueError: There is no such function, or a number is too small.
        ImportError: `cma` is not installed.
    """
    if num_evaluators < 1:
        raise ValueError("evolution_strategies needs at least one evaluator")
    problem = Problem(function, dimension, seed, population, tolerance, max_evaluations)
    # Of what nodes import inside of functions, launchers ask hosts and images for that which this
    # process has loaded: so who lacks it is refused before anything starts.
    import_cma()
    program = lp.Program("evolution_strategies")
    with program.group("evaluator"):
        evaluators = [
            program.add_node(lp.CourierNode(Evaluator, function, cost_ms))
            for _ in range(num_evaluators)
        ]
    program.add_node(lp.CourierNode(Evolver, problem, evaluators, output), label="evolver")
    return program
