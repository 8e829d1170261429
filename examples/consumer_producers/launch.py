"""Runs the program: `python -m examples.consumer_producers.launch --launcher=local_mt`."""

import launchpad_lite as lp
from examples.consumer_producers.program import make_program

if __name__ == "__main__":
    lp.launch(make_program())
