"""The same as a search of this project: one process asks a study in memory, and workers evaluate."""

import optuna
import task_queues

from launchpad_lite import search

_TRIALS = 2000


def _objective(params: dict) -> float:  # noqa: ARG001 - the model's
    return 0.0


def trials(workers: int, folder: str) -> float:
    """Returns trials per second, from the first result to the last."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    space = {"x": optuna.distributions.FloatDistribution(0.0, 1.0)}
    model = search.OptunaSearch(study, space, _objective, trials=_TRIALS)
    result = search.run(model, workers=workers, folder=folder)
    told_at = [trial.told_at for trial in result.trials]
    return (_TRIALS - 1) / (max(told_at) - min(told_at))


if __name__ == "__main__":
    task_queues.serve({"trials": trials})
