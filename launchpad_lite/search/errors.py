"""The errors of searches."""

from concurrent.futures import BrokenExecutor

import courier
from launchpad_lite.errors import LaunchpadError


class SearchError(LaunchpadError):
    """The root of all errors of searches."""


class FailedTaskError(SearchError, RuntimeError):
    """A task has no result: it raised, lost its workers too often, or took too long."""


class InitializerError(SearchError, BrokenExecutor):
    """The initializer of an executor raised in a worker: the executor has ended."""


class StoreError(SearchError, OSError):
    """The tasks of a broker cannot be read or written; the message says where and what to do."""


class StoreInUseError(StoreError):
    """Another broker uses this store."""


#: The errors of a call whose server is gone, or does not answer.
LOST = (
    courier.ServerGoneError,
    courier.CallTimeoutError,
    courier.ServerBusyError,
    StoreError,  # of the broker that was called: it ends
)


class TaskPickleError(SearchError, TypeError):
    """A task or its result cannot be pickled; the message names the part."""


class WorkerMismatchError(SearchError, RuntimeError):
    """A worker has another version of launchpad-lite, or runs on another Python."""


class StoppedEarlyError(Exception):
    """Raised by `search.report` in a task that the model has stopped.

    Not an error of the task: let it pass, after cleaning up.
    """
