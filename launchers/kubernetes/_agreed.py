"""Labels, annotations, ports and times that the launcher, the supervisor and the pods share."""

import math

RUN_LABEL = "launchpad-lite/run"
GROUP_LABEL = "launchpad-lite/group"
ROLE_LABEL = "launchpad-lite/role"
TOGETHER_LABEL = "launchpad-lite/together"
#: Of the first object: what the run consists of.
PLAN_ANNOTATION = "launchpad-lite/plan"
#: Of each object that a launch creates: a random word that tells which launch created it.
CREATED_BY_ANNOTATION = "launchpad-lite/created-by"
#: Of the supervisor's pod: shows the supervisor whether a launcher waits for the program.
LAUNCHER_ANNOTATION = "launchpad-lite/launcher"
DETACHED = "detached"
#: Of the supervisor's pod: a random word for the newest request for the stacks of the nodes.
STACKS_ANNOTATION = "launchpad-lite/stacks"
#: Of the supervisor's Job: which process asked to end the program, if it did not launch it.
STOP_ANNOTATION = "launchpad-lite/stop"
#: Roles of pods, and names of their containers.
NODE, SUPERVISOR = "node", "supervisor"
LINK_PORT = 4250
#: First port of a node; further addresses have the next ones.
FIRST_PORT = 4251
#: Folder where pods find the launcher's files: `/launchpad/trust` and others.
MOUNTS = "/launchpad"
#: Seconds beside the notice in which a pod ends.
SPARE_S = 10
#: The longest wait in seconds before Kubernetes makes a pod in place of one that failed. The wait
#: begins at 10 and doubles with each failure, for as long as the Job exists.
LONGEST_BACKOFF_S = 600.0
#: Seconds that stand for "until the pod ends by itself".
_ENDLESS_S = 30 * 24 * 3600


def grace_s(notice_s: float, spare_s: int = SPARE_S) -> int:
    """Returns the seconds from a pod's SIGTERM to its SIGKILL. A notice below 0 has no end."""
    if notice_s < 0 or math.isinf(notice_s):
        return _ENDLESS_S
    return math.ceil(notice_s) + spare_s
