"""Searches: a model proposes tasks, brokers pass them on, workers run them.

from launchpad_lite import search

After Hajewski and Oliveira, "Building Scalable Deep Learning Systems with RPC".
"""

from typing import TYPE_CHECKING

from courier.lowlevel import later
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import (
    FailedTaskError,
    SearchError,
    StoppedEarlyError,
    StoreError,
    StoreInUseError,
    TaskPickleError,
    WorkerMismatchError,
)
from launchpad_lite.search.tasks import (
    Call,
    Foreign,
    RunningTrial,
    Task,
    current_trial,
    needs,
    report,
)

# Loaded at the first use: an executor needs no models.
if TYPE_CHECKING:
    from launchpad_lite.search._model_node import Status
    from launchpad_lite.search._parts import ExecutorHandle
    from launchpad_lite.search.executor import Executor
    from launchpad_lite.search.looking import load, rerun
    from launchpad_lite.search.models import Callback, Model, Trial, TrialState
    from launchpad_lite.search.results import Result
    from launchpad_lite.search.running import add_to, run
    from launchpad_lite.search.searches import (
        Candidate,
        Genome,
        GridSearch,
        OptunaSearch,
        PopulationBasedTraining,
        RandomSearch,
        RegularizedEvolution,
        SuccessiveHalving,
        VariableLengthEvolution,
    )
else:
    __getattr__, __dir__ = later(
        globals(),
        {
            "._model_node": "Status",
            "._parts": "ExecutorHandle",
            ".executor": "Executor",
            ".looking": "load rerun",
            ".models": "Callback Model Trial TrialState",
            ".results": "Result",
            ".running": "add_to run",
            ".searches": "Candidate Genome GridSearch OptunaSearch PopulationBasedTraining RandomSearch "
            "RegularizedEvolution SuccessiveHalving VariableLengthEvolution",
        },
    )

__all__ = [
    "Call",
    "Callback",
    "Candidate",
    "Executor",
    "ExecutorHandle",
    "FailedTaskError",
    "Foreign",
    "Genome",
    "GridSearch",
    "Model",
    "OptunaSearch",
    "PopulationBasedTraining",
    "RandomSearch",
    "RegularizedEvolution",
    "Result",
    "RunningTrial",
    "SearchError",
    "Status",
    "StoppedEarlyError",
    "StoreError",
    "StoreInUseError",
    "SuccessiveHalving",
    "Task",
    "TaskPickleError",
    "Timing",
    "Trial",
    "TrialState",
    "VariableLengthEvolution",
    "WorkerMismatchError",
    "add_to",
    "current_trial",
    "load",
    "needs",
    "report",
    "rerun",
    "run",
]
