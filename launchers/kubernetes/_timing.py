"""Time limits and pauses of the Kubernetes launcher."""

from dataclasses import dataclass

from launchers.kubernetes._agreed import SPARE_S


@dataclass(frozen=True)
class Timing:
    """Limits and pauses in seconds; tests hand in others.

    Pauses between attempts grow from the first to the longest one.

    Attributes:
        attempts: How often a request is sent. This takes some 12 s: time for a server to restart,
            or for another one to take over.
        watch_silence_s: Time without data after which a watch counts as broken.
        log_silence_s: Time after which a silent log is read again: its connection may be gone.
        look_s: Pause between looks at objects that remain, or whose creation was interrupted.
        gone_s: Time that deleted objects may take to disappear.
        explain_s: Time within which a cluster tells how a lost pod ended.
        settle_s: Time after the end of a run in which the last changes of its pods arrive.
        patience_s: Time for which the deciding thread repeats one request. Then it first looks
            whether the user has asked for a faster end.
        tell_s: Time after which a removal tells what it waits for.
        gather_s: Time in which pods that wait for the same thing are gathered into one line.
        first_status_s: Time that an attached shell waits for a log with the status of the nodes.
        stuck_s: Time after which a machine that did not end a pod counts as not answering.
        greeting_s: Time in which a pod that calls the supervisor authenticates and sends its name.
        part_s: Time in which a pod reads the last data and closes its side of the connection.
        spare_s: Time beside the notice in which a pod ends. Pods themselves have `SPARE_S`.
    """

    request_pause_s: float = 0.25
    longest_request_pause_s: float = 4.0
    attempts: int = 7
    watch_pause_s: float = 0.5
    longest_watch_pause_s: float = 10.0
    watch_silence_s: float = 75.0
    log_silence_s: float = 45.0
    look_s: float = 0.5
    beat_s: float = 20.0
    gone_s: float = 30.0
    explain_s: float = 5.0
    settle_s: float = 1.0
    ask_again_s: float = 5.0
    patience_s: float = 2.0
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
