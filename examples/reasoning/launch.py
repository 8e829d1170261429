"""Runs the program and shows what happened: `python -m examples.reasoning.launch`.

`--compare=2` runs both modes in turn, twice each. `--kill=5` kills a generator every 5 s, and
`--hang=environment[1]` has an environment hang.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launchpad_lite as lp
from examples.reasoning.program import GROUP_SIZE, STALENESS, make_program

PICTURE_FILE = "post_training.svg"


@dataclass(frozen=True)
class Run:
    """What a run has written.

    Attributes:
        mode: `sync` or `async`.
        steps: A record of each step of the trainer.
        evaluations: A record of each evaluation.
        kills: When generators were killed.
        restarts: Nodes that were started again, with the reason.
        cpu_s: Seconds of all cores, of all nodes.
    """

    mode: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    kills: list[float]
    restarts: list[str]
    cpu_s: float

    @property
    def began_at(self) -> float:
        """When generators had their first weights."""
        return float(self.steps[0]["at"] - self.steps[0]["idle_s"])

    @property
    def seconds(self) -> float:
        """From then to the last step."""
        return float(self.steps[-1]["at"] - self.began_at)

    @property
    def groups(self) -> list[list[int]]:
        """The prompt, the staleness and the number of right answers of all groups."""
        return [group for step in self.steps for group in step["groups"]]

    @property
    def staleness(self) -> dict[int, int]:
        """How many groups were so many steps old."""
        return dict(sorted(Counter(group[1] for group in self.groups).items()))

    def line(self) -> str:
        """Returns it as a line of the table."""
        rollouts = GROUP_SIZE * len(self.groups)
        idle_s = sum(step["idle_s"] for step in self.steps)
        return (
            f"{self.mode:<6}{len(self.steps):6}{rollouts:10,}{self.seconds:9.1f}"
            f"{1000 * self.seconds / rollouts:13.2f}{idle_s / self.seconds:14.0%}"
            f"{self.evaluations[-1]['right']:8.1%}{max(self.staleness):11}{self.cpu_s:8.0f}"
        )


HEAD = "mode   steps  rollouts  seconds  ms/rollout  trainer waits   right  staleness  CPU (s)"


def main() -> int:
    """Trains a transformer to turn words around, by answers and then by GRPO."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--mode", default="async", help="async (default) or sync")
    parser.add_argument("--compare", type=int, metavar="ROUNDS", help="run both modes in turn")
    parser.add_argument("--generators", type=int, default=2, help="default 2")
    parser.add_argument("--environments", type=int, default=16, help="default 16")
    parser.add_argument("--steps", type=int, default=200, help="at most (default 200)")
    parser.add_argument("--target", type=float, default=0.9, help="default 0.9; 2: none")
    parser.add_argument("--tail", type=float, default=2.0, help="longest wait, s (default 2)")
    parser.add_argument("--kill", type=float, metavar="SECONDS", help="kill a generator so often")
    parser.add_argument("--hang", default="", metavar="NODE", help="hangs once: environment[1]")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--width", type=int, default=64, help="of the model (default 64)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for records and a picture")
    options = parser.parse_args()
    if options.kill is not None and options.launcher == "local_mt":
        parser.error("--kill kills processes; with local_mt all nodes are threads of this one")
    modes = [options.mode] if options.compare is None else [*STALENESS] * options.compare
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.output or Path(temporary)).absolute()
        for number, mode in enumerate(modes):
            try:
                runs.append(run(options, mode, folder / str(number)))
            except ValueError as error:
                parser.error(str(error))
    print(f"\n{HEAD}")
    for each in runs:
        print(each.line())
    for each in runs:
        prompts = Counter(group[0] for group in each.groups)
        print(f"\n{len(prompts):,} prompts, {max(prompts.values())} time each")
        print(f"groups by staleness: {each.staleness}, at most {STALENESS[each.mode]}")
        again = [f"{name} {times}x" for name, times in sorted(Counter(each.restarts).items())]
        print(f"{len(each.kills)} generators killed; started again: {', '.join(again) or 'none'}")
    if options.output is not None:
        draw(runs, options.output / PICTURE_FILE)
    reached = all(each.evaluations[-1]["right"] >= options.target for each in runs)
    return 0 if reached or options.target > 1 else 1


def run(options: argparse.Namespace, mode: str, folder: Path) -> Run:
    """Runs the program once."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.jsonl"):
        old.unlink()
    program = make_program(
        mode,
        options.generators,
        options.environments,
        options.steps,
        options.target,
        options.tail,
        options.hang,
        options.device,
        options.width,
        folder,
    )
    policy = lp.RestartPolicy("on_failure", max_restarts=1000, max_backoff_s=1.0)
    used_s, kills = cpu_s(), []
    with lp.launch(program, options.launcher, restart={"generator": policy}) as running:
        while not running.join(options.kill):
            found = [each.pid for each in running.status() if each.name.startswith("generator")]
            pids = [pid for pid in found if pid is not None]
            if pids and (folder / "steps.jsonl").exists():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(random.choice(pids), signal.SIGKILL)
                    kills.append(time.time())
        result = running.wait()
    steps, evaluations = (
        [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]
        for name in ("steps.jsonl", "evaluations.jsonl")
    )
    restarts = [each.node for each in result.restarts]
    return Run(mode, steps, evaluations, kills, restarts, cpu_s() - used_s)


def cpu_s() -> float:
    """Returns the seconds of all cores that this process, and those that it has ended, have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def draw(runs: list[Run], path: Path) -> None:
    """Draws right answers against seconds, and the staleness of groups with its bound."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "launchpad-lite"
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    right, staleness = figure.subplots(1, 2, width_ratios=(2, 1))
    colours = {"sync": "tab:orange", "async": "tab:blue"}
    for each in runs:
        points = [(record["at"] - each.began_at, record["right"]) for record in each.evaluations]
        right.plot(*zip(*points, strict=True), color=colours[each.mode], label=each.mode)
        for at in each.kills:
            label = "a generator is killed"
            right.axvline(at - each.began_at, color="grey", linewidth=0.5, label=label)
    right.set(xlabel="seconds of GRPO", ylabel="right answers to other words", ylim=(0, 1))
    handles = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    right.legend(handles.values(), handles, loc="lower right")
    last = runs[-1]
    staleness.bar([*last.staleness], [*last.staleness.values()], color=colours[last.mode])
    bound = STALENESS[last.mode]
    staleness.axvline(bound + 0.5, color="grey", linestyle="--", label="bound")
    staleness.set(xlabel=f"steps of age, {last.mode}", ylabel="groups", xticks=range(bound + 1))
    staleness.legend()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
