"""How long the launcher of pods waits, for what, and how often it asks again."""

from dataclasses import dataclass

from launchers._kubernetes.agreed import SPARE_S


@dataclass(frozen=True)
class Timing:
    """Limits and pauses; tests hand in others.

    Attributes:
        request_pause_s: Seconds until a request is tried again, at first; doubled with each.
        longest_request_pause_s: The most of these seconds.
        attempts: How often a request is tried: for some 12 s, in which a server restarts or another
            takes over.
        watch_pause_s: Seconds until it is tried again to watch what cannot be watched now, at first.
        longest_watch_pause_s: The most of these seconds.
        watch_silence_s: Seconds after which a watch that says nothing has broken.
        log_silence_s: Seconds after which a silent log is read again: its connection may be
            gone.
        creation_look_s: Seconds between two looks for an object whose creation was interrupted: the
            server may be about to create it.
        beat_s: Seconds between two words that the launching process waits.
        gone_s: Seconds in which all is gone that was asked to end.
        explain_s: Seconds within which a cluster tells what became of a pod that is lost, if its
            machine is not.
        ask_again_s: Seconds until what was asked of the cluster is asked again, which has not
            answered.
        patience_s: Seconds after which the thread that decides asks for an end no more at once, but
            first checks whether it is wanted sooner.
        look_s: Seconds between two looks at what remains.
        tell_s: Seconds of the removal of a run after which it is told how the program ended, and what
            is waited for.
        log_pause_s: Seconds between two attempts to read a log.
        gather_s: Seconds in which pods that wait for the same are gathered into one line.
        first_status_s: Seconds that a shell waits that attaches, until it has found a log that says
            how nodes are.
        longest_wait_s: Seconds after which the thread that decides reads its clock again, though
            nothing has happened.
        stuck_s: Seconds after which a machine is taken for one that does not answer, and what is seen
            from outside for what is.
        stuck_look_s: Seconds between two looks at a pod that does not leave.
        greeting_s: Seconds in which a caller of the supervisor proves itself and says who it is.
        part_s: Seconds in which a pod takes in what was said last, and ends its side.
        exhausted_s: Seconds after which pods may call again, when there were too many files.
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
    ask_again_s: float = 5.0
    patience_s: float = 2.0
    look_s: float = 0.5
    tell_s: float = 3.0
    log_pause_s: float = 1.0
    gather_s: float = 0.5
    first_status_s: float = 5.0
    longest_wait_s: float = 3600.0
    stuck_s: float = 20.0
    stuck_look_s: float = 1.0
    greeting_s: float = 20.0
    part_s: float = 2.0
    exhausted_s: float = 0.5
    spare_s: int = SPARE_S


#: What users get.
DEFAULT = Timing()
