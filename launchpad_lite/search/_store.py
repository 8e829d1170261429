"""Where a broker keeps its tasks, so that its end loses none: what all such places have in common."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from launchpad_lite.search._messages import Life, Limits, TaskOutcome, TaskState, TaskSubmission
from launchpad_lite.search._queue import Changes, QueuedTask


class Store:
    """Keeps the tasks of one broker; this class only in memory. For one thread at a time.

    What cannot be read or written is a `StoreError`.
    """

    def load(self) -> list[QueuedTask]:
        return []

    def write(self, changes: Changes) -> None:
        """Takes changes over, all or none."""

    def stage(self, key: str, what: str, body: bytes, part: int) -> bool:  # noqa: ARG002 - `write` takes all
        """Writes a part of something large, ahead of its task; returns whether it was the last.

        The body is all of it: `write` leaves this very object out.
        """
        return True

    def is_quick(self, changes: Changes) -> bool:  # noqa: ARG002 - it writes nothing
        """Returns whether writing changes takes less time than handing them to another thread."""
        return True

    def beat(self) -> None:
        """Shows other brokers that this one lives; raises if one has taken its tasks over."""

    def take_over(self, owner: str, silence_s: float) -> list[QueuedTask]:  # noqa: ARG002 - one broker only
        """Moves a model's tasks here from brokers without a `beat` for so long.

        These may write no more.
        """
        return []

    def close(self) -> None:
        """Releases it for another broker. Safe to call twice."""


#: Larger values are written in parts, with other writes in between.
PART_BYTES = 1 << 20
PAYLOAD, RESULT = "payload", "result"
#: Staged values, by task and kind of value.
Bodies = Mapping[tuple[str, str], bytes]
_NOTHING: Bodies = MappingProxyType({})
#: A task as a row, in this order. `options` and `status` are JSON: no database looks into them.
COLUMNS = ("id", "number", "owner", "options", "payload", "status", "result")
CHANGING = COLUMNS[5:]


def row_of(task: QueuedTask, staged: Bodies = _NOTHING) -> tuple[object, ...]:
    """Returns a task as a row, without what was staged."""
    key, payload, *options = task.submission
    is_staged = staged.get((key, PAYLOAD)) is payload
    fixed = key, task.number, task.owner, json.dumps(options), None if is_staged else payload
    return *fixed, *changing_of(task, staged)


def changing_of(task: QueuedTask, staged: Bodies = _NOTHING) -> tuple[object, ...]:
    ended = result = None
    if (outcome := task.outcome) is not None:
        ended = outcome.state.value, *outcome[4:]  # from its text on
        is_staged = staged.get((outcome.id, RESULT)) is outcome.payload
        result = None if is_staged else outcome.payload
    return json.dumps([task.lease, task.place, task.errors, task.losses, ended]), result


def task_of(row: Sequence[Any], staged: Bodies = _NOTHING) -> QueuedTask:
    key, number, owner, options, payload, status, result = row
    payload = staged.get((key, PAYLOAD), b"") if payload is None else payload
    kind, priority, retries, limits = json.loads(options)
    submission = TaskSubmission(key, bytes(payload), kind, priority, retries, Limits(*limits))
    lease, (machine, devices), errors, losses, ended = json.loads(status)
    task = QueuedTask(submission, owner, number, errors=tuple(errors), losses=losses)
    task.place = machine, tuple(devices)
    if lease is not None:
        task.lease = Life(*lease[0]), lease[1]
    if ended is not None:
        state = TaskState(ended[0])
        result = staged.get((key, RESULT), b"") if result is None else result
        task.outcome = TaskOutcome(key, "", state, bytes(result), *ended[1:])
    return task
