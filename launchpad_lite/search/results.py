"""The results of a search, as tables and a picture."""

import collections
import csv
import io
import itertools
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchpad_lite.errors import MissingExtraError
from launchpad_lite.search.models import Model, Trial, TrialState, best_of
from launchpad_lite.search.tasks import RunningTrial

_COLUMNS = (
    *("number", "state", "score", "seconds", "attempts", "lost_workers"),
    *("asked_at", "told_at", "seed", "worker", "task", "error"),
)


def row_of(trial: Trial) -> dict[str, Any]:
    """Returns a trial as a row of a table."""
    row = {name: getattr(trial, name) for name in _COLUMNS}
    row["state"] = trial.state.value
    if len(trial.values) > 1:
        row |= {f"values.{index}": value for index, value in enumerate(trial.values)}
    if trial.parent is not None or trial.steps is not None:
        row |= {"parent": trial.parent, "steps": trial.steps}
    return row | _flat(trial.params, "params")


@dataclass(frozen=True, repr=False)
class Result:
    """The results of a search.

    Attributes:
        trials: All trials, in the order in which the model asked for them.
        model: The model after the search.
        seconds: How long the search took, without times in which it did not run.
        folder: Of the search; None: it has none.
        state: `"complete"`; of one that was loaded also `"running"`, `"failed"`, `"stopped"` before its
            end, or `"unknown: .."`: on another machine.

    Example:
        result = search.run(model, workers=8)
        result.to_csv("trials.csv")
        result.plot("search.svg")
    """

    trials: Sequence[Trial]
    model: Model
    seconds: float
    folder: Path | None = None
    state: str = "complete"

    def __repr__(self) -> str:
        counts = collections.Counter(trial.state.value for trial in self.trials)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines = [f"{len(self.trials)} trials in {self.seconds:.1f} s: {states}"]
        if best := self.best:
            params = repr(dict(best.params))
            lines.append(f"best: trial {best.number}, score {best.score}, {params:.500}")
        if (runs := sum(trial.attempts for trial in self.trials)) > len(self.trials):
            lost = sum(trial.lost_workers for trial in self.trials)
            lines.append(f"workers lost: {lost}; runs: {runs}")
        for text, numbers in list(self.errors.items())[:5]:
            lines.append(f"failed {len(numbers)} times, as trial {numbers[0]}: {text:.500}")
        if hasattr(self.model, "study"):
            lines.append("study of Optuna: .model.study")
        return "\n".join(lines)

    @property
    def best(self) -> Trial | None:
        """The trial with the best score, of several objectives in the first one; None without one."""
        return best_of(self.trials, maximize=self.model.maximize)

    @property
    def best_trials(self) -> list[Trial]:
        """The best trials: with several objectives, those that no other beats in all of them."""
        signs = [1 if each else -1 for each in getattr(self.model, "directions", ())]
        if len(signs) < 2:
            return [] if self.best is None else [self.best]
        found = [
            (trial, [sign * value for sign, value in zip(signs, trial.values, strict=True)])
            for trial in self.trials
            if trial.values and trial.is_feasible
        ]

        def is_beaten(mine: list[float]) -> bool:
            return any(other != mine and all(map(operator.ge, other, mine)) for _, other in found)

        return [trial for trial, mine in found if not is_beaten(mine)]

    @property
    def errors(self) -> dict[str, list[int]]:
        """Why trials have failed, the most frequent first, with the numbers of these trials."""
        found: dict[str, list[int]] = {}
        for trial in filter(operator.attrgetter("error"), self.trials):
            text = trial.error.removeprefix(trial.task).removeprefix(f" on {trial.worker}")
            found.setdefault(text.lstrip(": ").partition("\n")[0], []).append(trial.number)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def folder_of(self, trial: Trial) -> Path:
        """Returns the folder of a trial, which may not be there; raises as `RunningTrial.folder`."""
        return RunningTrial(trial.number, trial.seed, self.folder)._folder_of(trial.number)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes a table of the trials: a row for each, with its parameters in columns."""
        Path(path).write_text(self.as_csv(), encoding="utf-8", newline="")

    def as_csv(self) -> str:
        """Returns the text that `to_csv` writes."""
        rows, file = [*map(row_of, self.trials)], io.StringIO()
        names = dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)])
        table = csv.DictWriter(file, list(names))
        table.writeheader()
        table.writerows(rows)
        return file.getvalue()

    def to_frame(self) -> Any:
        """Returns the table of `to_csv` as a frame of pandas.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise MissingExtraError("to_frame needs pandas. Run: pip install pandas") from None
        return pd.DataFrame([*map(row_of, self.trials)])

    def best_over_time(self) -> tuple[list[float], list[float]]:
        """Returns when each result was known, in seconds, and the best score until then."""
        done = [(at_s, score) for at_s, score, state in self._points() if state is TrialState.DONE]
        better = max if self.model.maximize else min
        scores = itertools.accumulate((score for _, score in done), better)
        return [at_s for at_s, _ in done], list(scores)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the scores of the trials over time, and the best one so far.

        Args:
            path: Of the picture; its ending says the format, as `.svg` and `.png`.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise MissingExtraError("plot needs matplotlib. Run: pip install matplotlib") from None
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        points = self._points()
        for state, color in ((TrialState.DONE, "tab:blue"), (TrialState.STOPPED, "lightgray")):
            found = [(at_s, score) for at_s, score, each in points if each is state]
            if found:
                times, scores = zip(*found, strict=True)
                axes.scatter(times, scores, s=10, c=color, label=state.value)
        best_times, best_scores = self.best_over_time()
        if best_times:
            axes.step(best_times, best_scores, "tab:orange", where="post", label="best")
            axes.legend()
        axes.set_xlabel("seconds")
        axes.set_ylabel("score")
        figure.savefig(path)

    def _points(self) -> list[tuple[float, float, TrialState]]:
        """Returns when each score was known."""
        return sorted(
            (
                (trial.told_at, trial.score, trial.state)
                for trial in self.trials
                if trial.score is not None and trial.told_at is not None
            ),
            key=lambda point: point[0],
        )


def _flat(params: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns parameters by the names of their columns: those of a nested dict as `params.a.b`."""
    columns: dict[str, Any] = {}
    for key, value in params.items():
        is_nested = isinstance(value, Mapping) and value
        columns |= _flat(value, f"{name}.{key}") if is_nested else {f"{name}.{key}": value}
    return columns
