"""The numbers of the frame protocol for what a frame says."""

import enum


class Kind(enum.IntEnum):
    """What a frame says. The client sends those below 16, the server the others."""

    CALL = 1
    TIMED_CALL = 2
    CANCEL = 3  # the caller has given this call up
    MORE = 4  # the pickle: what the items that were taken weigh, see `frames.item_weight`
    VALUE = 16
    FAILURE = 17
    UNKNOWN_METHOD = 18
    UNPICKLABLE = 19
    BAD_ARGUMENTS = 20
    BUSY = 21
    STOPPING = 22  # this call was not run: the server ends
    GENERATOR = 23  # items follow under the number of the call
    END = 24
    GOODBYE = 25  # no new calls here: the server ends
