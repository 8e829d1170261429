"""No reduction: each process copies its array, all at the same time."""

import numpy as np
import reductions


class Copy(reductions.Rank):
    """One process."""

    def join(self, addresses):  # noqa: ARG002 - the same for all
        """Does nothing: there is no other."""
        self.size = 1

    def array(self, nbytes):
        """Returns an array; also makes the one that it is copied to."""
        self._target = np.ones(nbytes // 4, np.float32)
        return np.ones(nbytes // 4, np.float32)

    def reduce(self, array):
        """Copies."""
        self._target[:] = array


if __name__ == "__main__":
    reductions.main(Copy)
