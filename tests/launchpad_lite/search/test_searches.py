"""Models that are ready to use, driven by hand."""

import csv
import functools
import itertools
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
    numbers = itertools.count()
    while True:
        if model.done():
            return results
        while len(outstanding) < at_once and (task := model.ask()) is not None:
            task.number = next(numbers)
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
        return (Word(self.text[:cut] + other.text[cut:]), Word(other.text[:cut] + self.text[cut:]))


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
    assert one.mark is not None
    assert one.mark == other.mark
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


def test_a_grid_tries_each_point_once_in_the_order_of_its_lists():
    grid = {"rate": [1, 2], "layers": {"width": (3, 4), "depth": range(5, 7)}}
    model = search.GridSearch(len, grid)
    assert model.total == 8
    points = [task.candidate for task, _ in play(model, at_once=1)]
    assert points[:3] == [
        {"rate": 1, "layers": {"width": 3, "depth": 5}},
        {"rate": 1, "layers": {"width": 3, "depth": 6}},
        {"rate": 1, "layers": {"width": 4, "depth": 5}},
    ]
    assert len({repr(point) for point in points}) == len(points) == 8


def test_parts_of_a_grid_that_depend_on_others_are_a_list_of_grids():
    model = search.GridSearch(len, [{"opt": ["sgd"], "momentum": [0.8, 0.9]}, {"opt": ["adam"]}])
    assert [task.candidate for task, _ in play(model, at_once=1)] == [
        {"opt": "sgd", "momentum": 0.8},
        {"opt": "sgd", "momentum": 0.9},
        {"opt": "adam"},
    ]


@pytest.mark.parametrize("grid", [{"opt": "sgd"}, {"layers": {"width": 64}}])
def test_values_of_a_grid_that_are_no_list_are_refused(grid):
    with pytest.raises(TypeError, match="a parameter has a list of values, or a dict, not"):
        search.GridSearch(hill, grid)


def test_the_identity_of_a_grid_has_no_addresses():
    grid = search.GridSearch(hill, {"activation": [hill, sample]}).identity()["grid"]
    assert grid == "{'activation': [<function hill>, <function sample>]}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: search.RandomSearch(hill, sample, 4),
        lambda: search.RegularizedEvolution(hill, sample, nudge, 4, population=2, tournament=1),
        lambda: search.SuccessiveHalving(hill, sample, 4),
        lambda: search.SuccessiveHalving(hill, sample, 4, promote=True),
        lambda: search.PopulationBasedTraining(hill, sample, nudge, population=4, rounds=1),
        lambda: search.GridSearch(hill, {"x": [6, 7]}),
    ],
)
def test_what_was_enqueued_is_tried_first_and_is_one_of_the_trials(make):
    model = make()
    model.enqueue({"x": 3.0})
    model.enqueue({"x": 4.0})
    tried = [task.candidate["x"] for task, _ in play(model, at_once=1)]
    assert tried[:2] == [3.0, 4.0]
    assert len(tried) == model.total == 4


def test_a_genome_that_was_enqueued_is_no_child_of_a_pair():
    model = search.VariableLengthEvolution(
        lambda word: 0.0, lambda rng: Word("a"), 9, population=2, tournament=1
    )
    model.enqueue(Word("abc"))
    assert model.ask().mark is None
    assert model.ask().candidate.text == "a"


class Population:
    """Rounds of population-based training that end when the test says so."""

    def __init__(self, **options: Any) -> None:
        self.model = search.PopulationBasedTraining(
            hill, sample, nudge, **{"population": 4, "rounds": 3, "quantile": 0.25, **options}
        )
        self._numbers = itertools.count()

    def ask(self) -> Any:
        task = self.model.ask()
        task.number = next(self._numbers)
        return task

    def first_round(self, *scores: float) -> list[Any]:
        tasks = [self.ask() for _ in scores]
        for task, score in zip(tasks, scores, strict=True):
            self.model.tell(task, score)
        return tasks


def test_who_is_among_the_worst_goes_on_from_the_checkpoint_of_one_of_the_best():
    population = Population()
    first = population.first_round(2.0, 3.0, 4.0, 1.0)
    second = [population.ask() for _ in first]
    assert [task.parent for task in first] == [None] * 4
    assert [task.parent for task in second] == [0, 1, 2, 2]
    assert [task.candidate for task in second[:3]] == [task.candidate for task in first[:3]]
    assert second[3].candidate["x"] == pytest.approx(first[2].candidate["x"], abs=30)
    assert second[3].candidate != first[2].candidate


def test_nobody_waits_for_a_slow_member_and_each_makes_its_rounds():
    population = Population()
    slow, *quick = [population.ask() for _ in range(4)]
    for _ in range(3):
        for task in quick:
            population.model.tell(task, float(task.number))
        quick = [task for _ in quick if (task := population.model.ask())]
        for task in quick:
            task.number = next(population._numbers)
    assert quick == []
    population.model.tell(slow, 100.0)
    assert population.ask().parent == slow.number


def test_a_member_whose_round_has_failed_goes_on_from_the_last_good_one():
    population = Population()
    first = population.first_round(1.0, 2.0, 3.0, 4.0)
    second = [population.ask() for _ in first]
    population.model.fail(second[2], search.FailedTaskError("lost"))
    population.model.fail(second[1], search.FailedTaskError("lost"))
    population.model.tell(second[0], 3.5)
    population.model.tell(second[3], math.nan)
    # One of the three is the worst, and goes on from the best; the others from what they had.
    assert [population.ask().parent for _ in first] == [second[0].number, second[0].number, 2, 3]


def test_the_first_round_that_fails_is_made_again_with_another_candidate():
    population = Population()
    task = population.ask()
    population.model.fail(task, search.FailedTaskError("lost"))
    again = [population.ask() for _ in range(4)][-1]
    assert (again.mark, again.parent) == (task.mark, None)
    assert again.candidate != task.candidate


def test_a_population_goes_on_from_its_checkpoint_and_to_more_rounds():
    population = Population()
    population.first_round(1.0, 2.0, 3.0, 4.0)
    outstanding = [population.ask() for _ in range(2)]
    model, tasks = pickle.loads(pickle.dumps((population.model, outstanding)))
    model.resumed(Population(rounds=5).model, tasks)
    population.model = model
    ended = {0, 1, 2, 3}
    while tasks:
        task = tasks.pop(0)
        assert task.parent in ended
        ended.add(task.number)
        model.tell(task, 1.0)
        tasks += [population.ask()] if len(ended) + len(tasks) < model.total else []
    assert len(ended) == model.total == 20
    assert model.ask() is None


def test_at_each_rung_the_best_goes_on_from_its_checkpoint():
    model = search.SuccessiveHalving(
        lambda candidate: candidate["x"], sample, 200, reduction=3, promote=True, last_rung=9
    )
    tried = {task.number: task for task, _ in play(model)}
    rungs = {steps: [t for t in tried.values() if t.steps == steps] for steps in (1, 3, 9)}
    assert sum(map(len, rungs.values())) == len(tried) == 200
    assert [len(rung) for rung in rungs.values()] == pytest.approx([139, 46, 15], abs=5)
    for steps in (3, 9):
        for task in rungs[steps]:
            assert tried[task.parent].steps * 3 == steps
            assert tried[task.parent].candidate == task.candidate
    parents = [task.parent for task in tried.values() if task.parent is not None]
    assert len(set(parents)) == len(parents), "one went on twice"
    best = sorted(task.candidate["x"] for task in rungs[1])[-20:]
    assert set(best) <= {task.candidate["x"] for task in rungs[3]}
    assert not model.report(rungs[1][0], 0, -1e9)


def test_who_has_diverged_or_was_stopped_does_not_go_on():
    model = search.SuccessiveHalving(diverge, sample, 100, promote=True, maximize=False)
    results = play(model, at_once=1)
    assert max(task.steps for task, _ in results) >= 9
    assert not any(task.candidate["x"] < 0 for task, _ in results if task.parent is not None)
    model = search.SuccessiveHalving(hill, sample, 9, promote=True, reduction=2)
    for number in range(2):
        task = model.ask()
        task.number = number
        model.stopped(task, 1.0)
    assert model.ask().parent is None


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


@pytest.mark.parametrize("is_function", [False, True])
def test_samplers_and_pruners_of_optuna_decide(is_function, optuna):
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
    )
    space = {"x": optuna.distributions.FloatDistribution(-10, 10)}
    if is_function:
        space = lambda trial: {"x": trial.suggest_float("x", -10, 10)}
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


def test_candidates_that_go_on_at_a_rung_do_not_train_again_what_they_have(tmp_path):
    def train(params):
        trial = search.current_trial()
        steps = 0 if trial.parent is None else int((trial.parent / "steps").read_text())
        for _ in range(steps, trial.steps):
            with (tmp_path / "made").open("a") as file:
                file.write("a step\n")
        (trial.folder / "steps").write_text(str(trial.steps))
        return params["x"] * trial.steps

    model = search.SuccessiveHalving(train, sample, 40, promote=True)
    result = run(model, folder=tmp_path / "search", ahead=2)
    made = len((tmp_path / "made").read_text().splitlines())
    furthest = {}
    for trial in result.trials:
        furthest[trial.params["x"]] = max(trial.steps, furthest.get(trial.params["x"], 0))
    assert made == sum(furthest.values())
    assert made < sum(trial.steps for trial in result.trials)
    with (tmp_path / "search" / "trials.csv").open() as file:
        rows = [(row["parent"], row["steps"]) for row in csv.DictReader(file)]
    assert rows[0] == ("", "1")
    assert max(int(steps) for _, steps in rows) >= 9
    assert all((parent == "") == (steps == "1") for parent, steps in rows)


def test_a_search_that_has_ended_goes_on_to_a_later_rung(tmp_path):
    def tune(trials, last_rung):
        model = search.SuccessiveHalving(hill, sample, trials, promote=True, last_rung=last_rung)
        return {trial.steps for trial in run(model, folder=tmp_path, ahead=1).trials}

    assert tune(4, 1) == {1}
    assert tune(8, 3) == {1, 3}


def test_a_search_that_goes_on_from_checkpoints_needs_a_folder():
    with pytest.raises(ValueError, match="SuccessiveHalving needs folder=: its trials go on from"):
        run(search.SuccessiveHalving(hill, sample, 9, promote=True))


@pytest.mark.slow  # Optuna opens its database four times
def test_what_was_enqueued_is_tried_once_though_each_call_of_the_script_enqueues_it(
    optuna, space, tmp_path
):
    storage = f"sqlite:///{tmp_path}/study.sqlite"

    def tune(make, folder, trials, *enqueued):
        model = make(trials)
        for x in enqueued:
            model.enqueue({"x": x})
        return [trial.params["x"] for trial in run(model, folder=tmp_path / folder).trials]

    def of_optuna(trials):
        study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
        return search.OptunaSearch(study, space, hill, trials)

    for name, make in (
        ("random", functools.partial(search.RandomSearch, hill, sample)),
        ("optuna", of_optuna),
    ):
        first = tune(make, name, 2, 1.5)
        later = tune(make, name, 5, 1.5, 2.5)
        assert later[:2] == first
        assert (later[0], later[2]) == (1.5, 2.5)
        assert len(set(later)) == 5


def test_a_function_of_a_trial_of_optuna_is_a_space_with_conditions(optuna, tmp_path):
    def space(trial):
        params = {"layers": {"count": trial.suggest_int("count", 1, 3)}}
        if trial.suggest_categorical("opt", ["sgd", "adam"]) == "sgd":
            params["momentum"] = trial.suggest_float("momentum", 0, 1)
        return params

    def evaluate(params):
        search.report(float(params["layers"]["count"]))
        return params.get("momentum", 0.5), params["layers"]["count"]

    def tune(trials, space=space):
        sampler = optuna.samplers.RandomSampler(seed=0)
        study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
        model = search.OptunaSearch(study, space, evaluate, trials)
        model.enqueue({"count": 2, "opt": "sgd", "momentum": 0.25})
        return run(model, folder=tmp_path)

    tune(5)
    result = tune(12)
    assert result.trials[0].params == {"layers": {"count": 2}, "momentum": 0.25}
    assert "{'layers': {'count': 2}, 'momentum': 0.25}" in result.trials[0].task
    assert {trial.state for trial in result.trials} == {search.TrialState.DONE}
    assert {"momentum" in trial.params for trial in result.trials} == {True, False}
    assert {trial.params["layers"]["count"] for trial in result.best_trials} >= {1}
    with (tmp_path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["params.layers.count"] for row in rows] == [
        str(trial.params["layers"]["count"]) for trial in result.trials
    ]
    with pytest.raises(search.SearchError, match=r"its space is .*<lambda>, and was .*space"):
        tune(13, lambda trial: {})


_FIVE = [-3, -1, 0.5, 2, 95]


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(search.GridSearch, grid={"x": _FIVE}),
        functools.partial(
            search.RandomSearch, sample=lambda rng: {"x": rng.choice(_FIVE)}, trials=40
        ),
    ],
)
def test_models_without_optuna_have_the_best_trials_of_several_objectives(make):
    def evaluate(params):
        x = params["x"]
        return 1.0 if x == -3 else (x, math.nan if x > 90 else x * x)

    result = run(make(evaluate, maximize=[True, False]))
    assert {trial.params["x"] for trial in result.best_trials} == {0.5, 2}
    failed = [trial for trial in result.trials if trial.state is search.TrialState.FAILED]
    assert {trial.params["x"] for trial in failed} == {-3}
    assert "returned 1.0; this search needs 2 numbers" in failed[0].error


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
    assert all("this search needs 2 numbers" in trial.error for trial in failed)
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


def test_a_search_does_not_go_on_in_the_folder_of_another_space(optuna, space, tmp_path):
    run(search.OptunaSearch(optuna.create_study(), space, hill, trials=1), folder=tmp_path)
    wider = {"x": optuna.distributions.FloatDistribution(-20, 20)}
    run(search.GridSearch(hill, {"x": [1]}), folder=tmp_path / "grid")
    with pytest.raises(search.SearchError, match=r"its grid is {'x': \[2\]}, and was {'x': \[1\]}"):
        run(search.GridSearch(hill, {"x": [2]}), folder=tmp_path / "grid")
    with pytest.raises(search.SearchError, match=r"its space is .*-20"):
        run(search.OptunaSearch(optuna.create_study(), wider, hill, trials=1), folder=tmp_path)
