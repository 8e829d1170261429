"""`python -m launchpad_lite.rollouts --file=JOIN_FILE --generators=N`: more generators for rollouts."""

import launchpad_lite as lp
from launchpad_lite.rollouts.joining import join

if __name__ == "__main__":
    lp.main(join)
