"""Optuna without a server: processes that share a study in a file, as its documentation shows it."""

import multiprocessing
import time
from typing import Any

import optuna
import task_queues
from optuna.storages.journal import JournalFileBackend

_TRIALS_S = 3.0
_context = multiprocessing.get_context("spawn")


def _objective(trial: optuna.Trial) -> float:
    trial.suggest_float("x", 0.0, 1.0)
    return 0.0


def _storage(kind: str, folder: str) -> Any:
    if kind == "journal":
        return optuna.storages.JournalStorage(JournalFileBackend(f"{folder}/journal"))
    return f"sqlite:///{folder}/study.sqlite"


def _optimize(kind: str, folder: str, barrier: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.RandomSampler()
    study = optuna.load_study(study_name="s", storage=_storage(kind, folder), sampler=sampler)
    barrier.wait()
    study.optimize(_objective, timeout=_TRIALS_S)


def trials(workers: int, folder: str, kind: str) -> float:
    """Returns trials per second."""
    study = optuna.create_study(study_name="s", storage=_storage(kind, folder))
    barrier = _context.Barrier(workers + 1)
    processes = [
        _context.Process(target=_optimize, args=(kind, folder, barrier)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    start = time.perf_counter()
    for process in processes:
        process.join()
    return len(study.trials) / (time.perf_counter() - start)


if __name__ == "__main__":
    task_queues.serve({"trials": trials})
