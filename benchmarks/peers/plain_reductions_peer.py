"""The carrier of this project, with arrays of the user's own."""

import carrier_reductions_peer
import reductions


class Plain(carrier_reductions_peer.Carrier):
    """One replica."""

    array = reductions.Rank.array


if __name__ == "__main__":
    reductions.main(Plain)
