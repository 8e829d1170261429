"""Draws a figure of the paper on PSP: `python -m examples.barriers.launch --figure=5`."""

import argparse
import json
import sys
from pathlib import Path

from examples.barriers.figures import FIGURES, save


def main() -> int:
    """Computes a figure of the paper on PSP, and writes its data and its picture."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    names = "; ".join(f"{number}: {figure.title}" for number, figure in FIGURES.items())
    parser.add_argument("--figure", type=int, choices=FIGURES, required=True, help=names)
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="FOLDER", help="default: here"
    )
    parser.add_argument("--format", default="png", help="of the picture: png (default), svg, pdf")
    trained = parser.add_argument_group("figure 7, which is trained for real")
    trained.add_argument("--seconds", type=float, default=60.0, help="default 60")
    trained.add_argument("--mean-delay", type=float, default=1.0, help="s per update (default 1)")
    trained.add_argument("--launcher", default="local_mp", help="default local_mp")
    options = parser.parse_args()

    figure = FIGURES[options.figure]
    how = (options.seconds, options.mean_delay, options.launcher)
    data = figure.compute(*(how if options.figure == 7 else ()))
    options.output.mkdir(parents=True, exist_ok=True)
    data_path = options.output / f"figure-{options.figure}.json"
    picture_path = data_path.with_suffix(f".{options.format}")
    data_path.write_text(json.dumps(data), encoding="utf-8")
    save(figure.draw(data), picture_path)
    print(f"Figure {options.figure}: {figure.title}")
    print(f"{data['assumptions']}\n\n{figure.table(data)}\n\n{data_path}\n{picture_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
