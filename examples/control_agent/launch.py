"""Learns to swing up a pendulum: `python -m examples.control_agent.launch --replicas=2`."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import launchpad_lite as lp
from examples.control_agent.acting import ENVIRONMENT
from examples.control_agent.program import FINAL_EPISODES, Result, Settings, make_program

RESULT_FILE = "result.json"
CURVE_FILE = "learning_curve.svg"


def main() -> int:
    """Learns to swing up a pendulum by D4PG: actors, a replay buffer, replicas of a learner."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--replicas", type=int, default=2, help="of the learner (default 2)")
    parser.add_argument("--actors", type=int, default=2, help="default 2")
    parser.add_argument("--batch", type=int, default=128, help="of all replicas (default 128)")
    parser.add_argument("--ratio", type=float, default=64.0, help="samples per insert (default 64)")
    parser.add_argument("--target", type=float, default=-200.0, help="mean return (default -200)")
    parser.add_argument("--max-seconds", type=float, default=300.0, help="give up (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for the result and a curve")
    options = parser.parse_args()
    settings = Settings(
        batch=options.batch,
        samples_per_insert=options.ratio,
        target=options.target,
        max_seconds=options.max_seconds,
        seed=options.seed,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = (folder / RESULT_FILE).resolve()
        path.unlink(missing_ok=True)
        try:
            program = make_program(options.actors, options.replicas, settings, path)
        except ValueError as error:
            parser.error(str(error))
        start = time.monotonic()
        running = lp.launch(program, options.launcher)
        running.wait()
        seconds = time.monotonic() - start
        result = Result(**json.loads(path.read_text(encoding="utf-8")))

    step, learned_s, reached = result.curve[-1]
    print(f"\n{ENVIRONMENT}: target {options.target:g} {'' if result.solved else 'NOT '}reached")
    print(
        f"mean return {reached:.1f} after {step:,} steps of {options.replicas} replicas, "
        f"{learned_s:.1f} s of learning, {seconds:.1f} s in all"
    )
    print(
        f"mean return of the last policy in {FINAL_EPISODES} other episodes: {result.final_return:.1f}"
    )
    print(
        f"{result.ratio:.1f} samples per insert ({options.ratio:g} asked for), "
        f"{result.inserts:,} inserts"
    )
    if options.output is not None:
        draw(result, options.target, options.output / CURVE_FILE)
    return 0 if result.solved else 1


def draw(result: Result, target: float, path: Path) -> None:
    """Draws the return against seconds, and against steps of the learner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    steps, seconds, returns = zip(*result.curve, strict=True)
    for axes, values, label in zip(
        figure.subplots(1, 2, sharey=True),
        (seconds, steps),
        ("seconds of learning", "steps of the learner"),
        strict=True,
    ):
        axes.plot(values, returns, ".-", label="without noise")
        axes.axhline(target, color="grey", linestyle="--", label="target")
        axes.set(xlabel=label, ylabel="mean return", title=ENVIRONMENT)
        axes.legend(loc="lower right")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
