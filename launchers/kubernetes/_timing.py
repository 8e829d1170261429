"""Time limits and pauses of the Kubernetes launcher."""

from dataclasses import dataclass

from launchers.kubernetes._agreed import SPARE_S


@dataclass(frozen=True)
class Timing:
    """Limits and pauses; tests hand in others.

    Attributes:
        request_pause_s: Seconds until a request is tried again, at first; doubled with each.
        longest_request_pause_s: The most of these seconds.
        attempts: How often a request is sent. This takes some 12 s: time for a server to restart, or
            for another one to take over.
        watch_pause_s: Seconds until a watch that failed is tried again, at first.
        longest_watch_pause_s: The most of these seconds.
        watch_silence_s: Seconds without data after which a watch counts as broken.
        log_silence_s: Seconds after which a silent log is read again: its connection may be
            gone.
        creation_look_s: Seconds between two looks for an object whose creation was interrupted: the
            server may be about to create it.
        beat_s: Seconds between two signs of life of the launching process.
        gone_s: Seconds that deleted objects may take to disappear.
        explain_s: Seconds within which a cluster tells how a lost pod ended, if the pod's machine is
            not lost as well.
        settle_s: Seconds after the end of a run in which the last changes of its pods arrive.
        ask_again_s: Seconds until a request that the cluster did not answer is sent again.
        patience_s: Seconds for which the deciding thread repeats one request. Then it first looks
            whether the user has asked for a faster end.
        look_s: Seconds between two looks at the objects that remain.
        tell_s: Seconds after the start of a removal at which the launcher tells how the program ended
            and what it waits for.
        log_pause_s: Seconds between two attempts to read a log.
        gather_s: Seconds in which pods that wait for the same thing are gathered into one line.
        first_status_s: Seconds that an attached shell waits for a log with the status of the nodes.
        stuck_s: Seconds after which a machine that did not end a pod counts as not answering.
        stuck_look_s: Seconds between two looks at a pod that does not end.
        greeting_s: Seconds in which a pod that calls the supervisor authenticates and sends its name.
        part_s: Seconds in which a pod reads the last data and closes its side of the connection.
        spare_s: Seconds beside the notice in which a pod ends. Pods themselves have `SPARE_S`.
    """

    request_pause_s: float = 0.25
    longest_request_pause_s: float = 4.0
    attempts: int = 7
    watch_pause_s: float = 0.5
    longest_watch_pause_s: float = 10.0
    watch_silence_s: float = 75.0
    log_silence_s: float = 45.0
    creation_look_s: float = 0.5
    beat_s: float = 20.0
    gone_s: float = 30.0
    explain_s: float = 5.0
    settle_s: float = 1.0
    ask_again_s: float = 5.0
    patience_s: float = 2.0
    look_s: float = 0.5
    tell_s: float = 3.0
    log_pause_s: float = 1.0
    gather_s: float = 0.5
    first_status_s: float = 5.0
    stuck_s: float = 20.0
    stuck_look_s: float = 1.0
    greeting_s: float = 20.0
    part_s: float = 2.0
    spare_s: int = SPARE_S


#: What users get.
DEFAULT = Timing()
