"""The speed of a training: as numbers, as a line of text, and for TensorBoard."""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import launchpad_lite as lp
from launchpad_lite.parts import nests


@dataclass
class Report:
    """The cost of the steps of a training, in this life of the replica.

    Attributes:
        steps: How many it has made.
        examples: How many it has seen.
        seconds: How long they took, with the code between them.
        waited_s: Seconds of these for other replicas and for data between them.
        input_s: Seconds of these for input.
        losses: How often a replica was lost since the start.
        lost_s: Seconds from losses until steps were made again.

    Example:
        report = repl.report
        print(report.examples / report.seconds, "examples/s in this replica")
    """

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    input_s: float = 0.0
    losses: int = 0
    lost_s: float = 0.0

    def __str__(self) -> str:
        seconds = max(self.seconds, 1e-9)
        lost = f"; {self.losses} losses, {self.lost_s:,.0f} s until steps were made again"
        return (
            f"{self.steps:,} steps, {self.examples:,} examples in {self.seconds:,.0f} s: "
            f"{self.waited_s / seconds:.0%} of the time in communication, {self.input_s / seconds:.0%} waiting "
            f"for input{lost if self.losses else ''}"
        )


class Share(NamedTuple):
    """The work of one replica so far, as all know it."""

    examples: float
    waited_s: float
    input_s: float


class TrainingProgress:
    """Shows the progress of a training of `total` steps, on replica 0.

    A line comes every `period_s` seconds. Scalars for TensorBoard go to the folder, if there is
    one; MissingExtraError: its package is missing.
    """

    def __init__(self, label: str, total: int | None, period_s: float, folder: str | None) -> None:
        self._label = label
        self._total = total
        self._period_s = period_s
        self._at = time.monotonic()
        self._step: int | None = None
        self._shares: Sequence[Share] = ()
        self._writer: Any = None
        if folder is not None:
            try:
                from tensorboard.summary import Writer
            except ImportError:
                raise lp.MissingExtraError(
                    "scalars for TensorBoard need its package: pip install tensorboard"
                ) from None
            self._writer = Writer(folder)

    def note(
        self, step: int, results: Sequence[Any], shares: Sequence[Share], more: str = ""
    ) -> None:
        """Notes that `step` steps were made, and shows the progress if it is time."""
        if self._writer is not None:
            for path, value in _means(results):
                self._writer.add_scalar(path, value, step)
        now = time.monotonic()
        if self._step is None:  # the first one also compiled and connected
            self._at, self._step, self._shares = now, step, shares
            return
        if now - self._at < self._period_s:
            return
        seconds, steps = now - self._at, step - self._step
        per_s = [
            Share(*((new - old) / seconds for old, new in zip(*pair, strict=True)))
            for pair in zip(self._shares, shares, strict=True)
        ]
        examples_per_s = sum(share.examples for share in per_s)
        of_total = "" if self._total is None else f" of {self._total:,}"
        print(  # noqa: T201 - users expect the progress here
            f"{self._label}: step {step:,}{of_total}, {steps / seconds:,.1f} steps/s, "
            f"{examples_per_s:,.0f} examples/s, {_span(share.waited_s for share in per_s)} of the "
            f"time in communication, {_span(share.input_s for share in per_s)} waiting for input{more}",
            file=sys.stderr,
        )
        if self._writer is not None:
            self._writer.add_scalar("steps_per_s", steps / seconds, step)
            self._writer.add_scalar("examples_per_s", examples_per_s, step)
        self._at, self._step, self._shares = now, step, shares

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _span(parts: Iterable[float]) -> str:
    found = sorted(parts)
    return f"{found[0]:.0%} to {found[-1]:.0%}"


def _means(results: Sequence[Any]) -> "list[tuple[str, float]]":
    """Returns the numbers in results by path, as means over the replicas."""
    found: dict[str, list[float]] = {}
    for result in results:
        for path, leaf in nests.leaves(result):
            if nests.kind(leaf) and not getattr(leaf, "shape", ()):
                name = path.replace("['", "/").replace("']", "").strip("/.") or "result"
                found.setdefault(name, []).append(float(leaf))
    return [(path, sum(values) / len(values)) for path, values in found.items()]
