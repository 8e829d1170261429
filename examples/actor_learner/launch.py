"""Runs the program and shows its progress: `python -m examples.actor_learner.launch`."""

import argparse
import concurrent.futures
import sys
import tempfile
import time
from pathlib import Path

import courier
import launchpad_lite as lp
from examples.actor_learner.program import (
    ENVIRONMENT,
    HIGHEST_RETURN,
    RESULT_FILE,
    Learner,
    Progress,
    Result,
    make_program,
    read_result,
    table,
)
from launchpad_lite.launching import RunningProgram

CURVE_FILE = "learning_curve.png"

#: Seconds between two looks at the learner; and between two lines where none can be rewritten.
LOOK_S = 0.2
LINE_S = 5.0


def main() -> int:
    """Learns to balance a pole with PPO: actors, a learner, an evaluator."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--actors", type=int, default=2, help="default 2")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="keep the result and a learning curve there"
    )
    parser.add_argument("--target", type=float, default=475, help="mean return (default 475)")
    parser.add_argument("--episodes", type=int, default=100, help="to evaluate (default 100)")
    parser.add_argument("--max-seconds", type=float, default=300, help="give up (default 300)")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.output or Path(temporary)
        try:
            program = make_program(
                options.actors,
                options.seed,
                folder,
                target=options.target,
                episodes=options.episodes,
                max_seconds=options.max_seconds,
            )
            folder.mkdir(parents=True, exist_ok=True)
            # Removes the results of an earlier run.
            (folder / RESULT_FILE).unlink(missing_ok=True)
            (folder / CURVE_FILE).unlink(missing_ok=True)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        start = time.monotonic()
        # An actor that is lost has nothing to lose, so it is simply started again.
        running = lp.launch(program, options.launcher, restart={"actor": "on_failure"})
        print(f"{ENVIRONMENT} with {options.actors} actors ({running.plan.where})")
        learner = program.groups["learner"][0].create_handle().dereference()
        show_progress(running, learner)
        running.wait()
        seconds = time.monotonic() - start
        result = read_result(folder)

    print(f"\n{table(result)}\n")
    if options.output is not None:
        draw(result, options.output / CURVE_FILE)
        print(f"Result: {options.output / RESULT_FILE}, {options.output / CURVE_FILE}")
    print(f"In all {seconds:.1f} s, with the start and the end of the nodes")
    print(f"Logs: {running.log_dir or 'none, as all nodes were threads of this process'}")
    return 0 if result.solved else 1


def show_progress(running: RunningProgram, learner: Learner) -> None:
    """Shows how far the program is until it ends: one line, rewritten where that is possible."""
    is_terminal = sys.stdout.isatty()
    next_line = LINE_S
    is_shown = False
    while not running.join(LOOK_S):
        try:
            call = courier.submit(learner.progress)
            progress = call.result(LOOK_S)
        except concurrent.futures.TimeoutError:  # not up yet
            call.cancel()
            continue
        except courier.CourierError:  # no longer
            continue
        if is_terminal:
            print(f"\r{line(progress)}\x1b[K", end="", flush=True)
            is_shown = True
        elif progress.seconds >= next_line:
            print(line(progress), flush=True)
            next_line = progress.seconds + LINE_S
    if is_shown:
        print()


def line(progress: Progress) -> str:
    """Returns how far the program is, as one line."""
    return (
        f"update {progress.updates:4,}   {progress.steps:8,} steps   "
        f"training {_shown(progress.training_return)}   "
        f"greedy {_shown(progress.evaluation_return)}   {progress.seconds:5.1f} s"
    )


def _shown(mean_return: float | None) -> str:
    return "    -" if mean_return is None else f"{mean_return:5.1f}"


def draw(result: Result, path: Path) -> None:
    """Draws the learning curve as PNG."""
    # Takes a second, and is for those who keep the picture. Not pyplot, which may want a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    trained = [point for point in result.curve if point.training_return is not None]
    axes.plot(
        [point.steps for point in trained],
        [point.training_return or 0.0 for point in trained],
        label="training",
    )
    axes.plot(
        [each.steps for each in result.evaluations],
        [each.mean_return for each in result.evaluations],
        "o",
        label="evaluation, greedy",
    )
    axes.axhline(result.target, color="grey", linestyle="--", label="target")
    axes.set(xlabel="environment steps", ylabel="mean return", title=ENVIRONMENT)
    axes.set_ylim(0, HIGHEST_RETURN * 1.05)
    axes.legend(loc="lower right")
    figure.savefig(path, backend="agg")


if __name__ == "__main__":
    sys.exit(main())
