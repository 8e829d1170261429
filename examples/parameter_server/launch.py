"""Runs the program and shows its result: `python -m examples.parameter_server.launch`.

It runs in each topology, one after the other, or with `--topology=cached` in one.
"""

import argparse
import json
import tempfile
from pathlib import Path

import launchpad_lite as lp
from examples.parameter_server.program import TOPOLOGIES, Result, make_program, table


def main() -> None:
    """Trains a linear regression by asynchronous SGD with a parameter server."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--launcher", default="local_mp", help="local_mp (default) or local_mt")
    parser.add_argument("--topology", choices=TOPOLOGIES, help="default: one after the other")
    parser.add_argument("--requesters", type=int, default=8, help="default 8")
    parser.add_argument("--servers", type=int, default=2, help="when replicated (default 2)")
    parser.add_argument("--cachers", type=int, default=2, help="when cached (default 2)")
    parser.add_argument("--steps", type=int, default=400, help="of each requester (default 400)")
    options = parser.parse_args()
    topologies = [options.topology] if options.topology else TOPOLOGIES

    with tempfile.TemporaryDirectory() as folder:
        outputs = {topology: Path(folder) / f"{topology}.json" for topology in topologies}
        try:
            programs = {
                topology: make_program(
                    topology,
                    options.requesters,
                    output,
                    num_servers=options.servers,
                    num_cachers=options.cachers,
                    steps=options.steps,
                )
                for topology, output in outputs.items()
            }
        except ValueError as error:
            parser.error(str(error))
        for topology, program in programs.items():
            running = lp.launch(program, options.launcher)
            print(f"{topology}: {options.requesters} requesters ({running.plan.where})")
            running.wait()
        results = [Result(**json.loads(output.read_text())) for output in outputs.values()]

    print(f"\n{table(results)}\n")
    print("pulls/s: weights that all requesters got together, each with a gradient pushed")
    print("distance: from the best weights, by least squares, as a part of their length")


if __name__ == "__main__":
    main()
