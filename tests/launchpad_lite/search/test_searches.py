"""Models that are ready to use, driven by hand."""

import functools
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from launchpad_lite import search
from tests.launchpad_lite.search.tasks_for_tests import QUICK


def play(model: search.Model, at_once: int = 4, curve: Callable[[Any], list[float]] = lambda _: []):
    """Runs a search in this thread, with some tasks at a time in an order of its own."""
    rng = random.Random(0)
    outstanding: list[Any] = []
    results = []
    while True:
        if model.done():
            return results
        while len(outstanding) < at_once and (task := model.ask()) is not None:
            outstanding.append(task)
        if not outstanding:
            return results
        task = outstanding.pop(rng.randrange(len(outstanding)))
        points = curve(task)
        for step, value in enumerate(points):
            if model.report(task, step, value):
                model.stopped(task, value)
                break
        else:
            results.append((task, task.run()))
            model.tell(*results[-1])


def hill(candidate: dict[str, float]) -> float:
    return -((candidate["x"] - 3.0) ** 2)


def sample(rng: random.Random) -> dict[str, float]:
    return {"x": rng.uniform(-100, 100)}


def nudge(candidate: dict[str, float], rng: random.Random) -> dict[str, float]:
    return {"x": candidate["x"] + rng.gauss(0, 5)}


def test_a_random_search_tries_as_many_as_it_is_to_and_the_same_for_the_same_seed():
    first, second, other = (
        play(search.RandomSearch(hill, sample, 20, seed=seed)) for seed in (1, 1, 2)
    )
    assert len(first) == 20
    assert [task.candidate for task, _ in first] == [task.candidate for task, _ in second]
    assert [task.candidate for task, _ in first] != [task.candidate for task, _ in other]


@pytest.mark.parametrize("maximize", [True, False])
def test_regularized_evolution_comes_nearer_than_chance(maximize):
    sign = 1 if maximize else -1

    def evaluate(candidate):
        return sign * hill(candidate)

    model = search.RegularizedEvolution(
        evaluate, sample, nudge, 400, population=20, tournament=5, maximize=maximize
    )
    results = play(model)
    assert max(sign * result for _, result in results) > -0.01
    late = [sign * result for _, result in results[-100:]]
    assert sorted(late)[50] > -100  # chance: about -2,500


class Word:
    """A word that is to become `aaaa`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def mutate(self, rng: random.Random) -> "Word":
        if len(self.text) < 4 and rng.random() < 0.5:
            return Word(self.text + rng.choice("abc"))
        return self

    def crossover(self, other: "Word", rng: random.Random) -> tuple["Word", "Word"]:
        cut = rng.randrange(len(self.text) + 1)
        return (
            Word(self.text[:cut] + other.text[cut:]),
            Word(other.text[:cut] + self.text[cut:]),
        )


def test_evolution_of_variable_length_recombines_and_extends():
    model = search.VariableLengthEvolution(
        lambda word: word.text.count("a"), lambda rng: Word(rng.choice("abc")), 300
    )
    results = play(model)
    assert max(result for _, result in results) == 4
    # Of two children of parents of different lengths, only the fitter one lives.
    assert len(model._living) == 20


def test_of_a_pair_of_children_the_fitter_one_lives_even_if_the_other_fails():
    model = search.VariableLengthEvolution(
        lambda word: 0.0, lambda rng: Word("a"), 4, population=2, tournament=2
    )
    for text in ("a", "bb"):
        task = model.ask()
        task.candidate = Word(text)
        model.tell(task, 0.0)
    one, other = model.ask(), model.ask()
    assert one.pair is not None
    assert one.pair == other.pair
    model.fail(one, search.FailedTaskError("lost"))
    model.tell(other, 5.0)
    assert (5.0, other.candidate) in model._living


def test_successive_halving_stops_who_is_behind_at_a_rung():
    model = search.SuccessiveHalving(
        lambda candidate: candidate["x"], sample, 100, first_rung=1, reduction=3
    )
    results = play(model, curve=lambda task: [task.candidate["x"]] * 9)
    finished = [result for _, result in results]
    assert 1 <= len(finished) <= 20
    assert max(finished) > 80


def test_a_search_takes_only_numbers():
    model = search.RandomSearch(hill, sample, 1)
    with pytest.raises(search.SearchError, match="needs a number"):
        model.tell(model.ask(), "good")


def diverge(candidate: dict[str, float]) -> float:
    return math.nan if candidate["x"] < 0 else -candidate["x"]


def test_a_candidate_that_diverges_is_the_worst_and_the_search_goes_on():
    model = search.RegularizedEvolution(
        diverge, sample, nudge, 200, population=20, tournament=5, maximize=False
    )
    results = play(model)
    assert len(results) == 200
    assert not any(math.isnan(result) for _, result in results[-50:])


def test_successive_halving_stops_who_diverges():
    model = search.SuccessiveHalving(diverge, sample, 100)
    results = play(model, curve=lambda task: [diverge(task.candidate)] * 9)
    assert results
    assert not any(math.isnan(result) for _, result in results)


def test_bytes_are_no_score():
    assert search.Model().score(b"[1.5, 2]") is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: search.RandomSearch(hill, sample, 0),
        lambda: search.RegularizedEvolution(hill, sample, nudge, 9, population=2, tournament=3),
        lambda: search.VariableLengthEvolution(hill, sample, 9, population=2, tournament=0),
        lambda: search.SuccessiveHalving(hill, sample, 9, reduction=1),
    ],
)
def test_numbers_that_make_no_search_are_refused(make):
    with pytest.raises(ValueError, match="not"):
        make()


@pytest.fixture
def optuna():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@pytest.fixture
def space(optuna):
    return {"x": optuna.distributions.FloatDistribution(-10, 10)}


def test_a_search_gives_its_trials_limits_and_takes_over_newer_ones():
    def made(**limits: Any) -> search.RandomSearch[float]:
        return search.RandomSearch(abs, lambda rng: rng.random(), 9, **limits)

    model = made(timeout_s=60, retries=2)
    task = model.ask()
    assert (task.timeout_s, task.retries, task.progress_timeout_s) == (60, 2, None)
    model.resumed(made(progress_timeout_s=5), [task])
    for each in (task, model.ask()):
        assert (each.timeout_s, each.retries, each.progress_timeout_s) == (None, 0, 5)
    with pytest.raises(ValueError, match="timeout_s and progress_timeout_s are above 0"):
        made(timeout_s=0)
    with pytest.raises(TypeError, match="RandomSearch takes no timeout"):
        made(timeout=60)


def test_samplers_and_pruners_of_optuna_decide(optuna):
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
    )
    space = {"x": optuna.distributions.FloatDistribution(-10, 10)}
    model = search.OptunaSearch(study, space, hill, trials=30)
    play(model, curve=lambda task: [hill(task.candidate)] * 3)
    states = [trial.state for trial in study.trials]
    assert len(states) == 30
    assert states.count(optuna.trial.TrialState.PRUNED) > 5
    assert study.best_value == max(hill(t.params) for t in study.trials if t.values)


def test_a_trial_of_optuna_that_diverges_fails(optuna, space):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    play(search.OptunaSearch(study, space, diverge, trials=10))
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "FAIL"}


def test_a_study_that_is_newer_than_the_checkpoint_of_its_search_is_told_once(
    optuna, space, tmp_path
):
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
    study = optuna.create_study(storage=optuna.storages.JournalStorage(backend))
    given = search.OptunaSearch(study, space, hill, trials=4)
    model = search.OptunaSearch(study, space, hill, trials=3)
    told, failed = model.ask(), model.ask()
    kept = pickle.dumps((model, [told, failed]))
    model.tell(told, -1.0)
    model.fail(failed, search.FailedTaskError("lost"))
    model.ask()  # nobody knows of it after the kill
    model, tasks = pickle.loads(kept)
    model.resumed(given, tasks)
    model.tell(tasks[0], -2.0)
    model.tell(tasks[1], -3.0)
    play(model)
    assert [trial.state.name for trial in study.trials] == [
        "COMPLETE",
        "FAIL",
        "FAIL",
        "COMPLETE",
        "COMPLETE",
    ]
    assert study.trials[0].value == -1.0


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize("sampler", ["grid", "brute force"])
def test_a_sampler_of_optuna_that_has_tried_all_ends_the_search(sampler, optuna):
    grid = {"x": [1, 2, 3]}
    samplers = {
        "grid": optuna.samplers.GridSampler(grid),
        "brute force": optuna.samplers.BruteForceSampler(),
    }
    study = optuna.create_study(sampler=samplers[sampler])
    space = {"x": optuna.distributions.CategoricalDistribution(grid["x"])}
    play(search.OptunaSearch(study, space, hill, trials=50), at_once=1)
    assert sorted(trial.params["x"] for trial in study.trials) == grid["x"]


run = functools.partial(search.run, launcher="local_mt", workers=1, timing=QUICK, progress=False)


@pytest.mark.filterwarnings("ignore:.*constraints_func:FutureWarning")
def test_the_best_trial_keeps_the_constraints_of_its_study(optuna, space):
    sampler = optuna.samplers.TPESampler(
        seed=0, constraints_func=lambda trial: [trial.params["x"] - 1]
    )
    study = optuna.create_study(sampler=sampler, direction="maximize")
    result = run(search.OptunaSearch(study, space, lambda params: params["x"], trials=10))
    feasible = [trial.params["x"] for trial in result.trials if trial.params["x"] <= 1]
    assert result.best is not None
    assert 0 < len(feasible) < 10
    assert result.best.score == max(feasible)


def test_with_several_objectives_the_best_trials_are_those_that_no_other_one_beats(
    optuna, space, tmp_path
):
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=optuna.samplers.RandomSampler(seed=0)
    )

    def evaluate(params):
        if params["x"] < -5:
            return 1.0  # one is missing
        return params["x"] ** 2, params["x"]

    result = run(search.OptunaSearch(study, space, evaluate, trials=20), folder=tmp_path)
    positive = {trial.params["x"] for trial in result.trials if trial.params["x"] >= 0}
    good = {trial.params["x"] for trial in result.best_trials}
    assert good.issuperset(positive)
    assert good == {trial.params["x"] for trial in result.model.study.best_trials}
    failed = [trial for trial in result.trials if trial.state is search.TrialState.FAILED]
    assert failed
    assert all("this study needs 2 numbers" in trial.error for trial in failed)
    assert "values.1" in (tmp_path / "trials.csv").read_text().splitlines()[0]


def test_what_prunes_a_trial_as_in_optuna_stops_it(optuna, space):
    def evaluate(params):
        if params["x"] < 0:
            raise optuna.TrialPruned
        return params["x"]

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    result = run(search.OptunaSearch(study, space, evaluate, trials=10))
    states = {trial.params["x"] < 0: trial.state for trial in result.trials}
    assert states == {True: search.TrialState.STOPPED, False: search.TrialState.DONE}
    assert {trial.state.name for trial in result.model.study.trials} == {"COMPLETE", "PRUNED"}


def test_a_random_search_does_not_go_on_in_the_folder_of_a_study(optuna, space, tmp_path):
    run(search.OptunaSearch(optuna.create_study(), space, hill, trials=1), folder=tmp_path)
    with pytest.raises(search.SearchError, match="algorithm is RandomSearch, and was OptunaSearch"):
        run(search.RandomSearch(hill, sample, 1), folder=tmp_path)
    wider = {"x": optuna.distributions.FloatDistribution(-20, 20)}
    with pytest.raises(search.SearchError, match=r"its space is .*-20"):
        run(search.OptunaSearch(optuna.create_study(), wider, hill, trials=1), folder=tmp_path)
