"""Security contexts: of pods, and of containers in them."""

from launchers._kubernetes.checks.places import Place, Rules, apply, need
from launchers._kubernetes.checks.values import (
    capability,
    one_of,
    path_below,
    sysctl,
    user,
)

_POD_RULES: Rules = (
    ("fsGroupChangePolicy", one_of("OnRootMismatch", "Always")),
    ("supplementalGroupsPolicy", one_of("Merge", "Strict")),
    ("seLinuxChangePolicy", one_of("MountOption", "Recursive")),
    ("{runAsUser,runAsGroup,fsGroup}", user),
    ("supplementalGroups[]", user),
    ("sysctls[].name", sysctl),
)
_CONTAINER_RULES: Rules = (
    ("{runAsUser,runAsGroup}", user),
    ("procMount", one_of("Default", "Unmasked")),
    ("capabilities.{add,drop}[]", capability),
)


def check_context_of_pod(context: Place) -> None:
    apply(context, _POD_RULES)
    need(context, [("sysctls[]", "name")])
    _check_profiles(context)


def check_context_of_container(own: Place, pods: Place) -> None:
    """Checks what a container may do.

    Args:
        own: The container's context.
        pods: The context of its pod, which holds for all that the container's does not say.
    """
    apply(own, _CONTAINER_RULES)
    _check_profiles(own)
    if own["allowPrivilegeEscalation"].value is False:
        if own["privileged"].value is True:
            own["privileged"].wrong("does not go with allowPrivilegeEscalation: false")
        # The server does not know it by the name without CAP_, and lets it pass.
        for each in own.select("capabilities.add[]"):
            if each.value == "CAP_SYS_ADMIN":
                each.wrong("CAP_SYS_ADMIN does not go with allowPrivilegeEscalation: false")
    users = [each["runAsUser"] for each in (own, pods) if each["runAsUser"].given]
    rules = [each["runAsNonRoot"] for each in (own, pods) if each["runAsNonRoot"].given]
    if users and rules and users[0].number == 0 and rules[0].value is True:
        users[0].wrong("0 is root, which runAsNonRoot: true forbids; take another, like 65532")


def _check_profiles(context: Place) -> None:
    context["seccompProfile"]["localhostProfile"].obey(path_below)
    need(context, [("{seccompProfile,appArmorProfile}", "type")])
    for profile in (context["seccompProfile"], context["appArmorProfile"]):
        profile["type"].obey(one_of("RuntimeDefault", "Localhost", "Unconfined"))
        if profile["type"].value == "Localhost":
            if not profile["localhostProfile"].text:
                profile["localhostProfile"].wrong("missing; type Localhost needs it")
        elif profile["localhostProfile"].given:
            profile["localhostProfile"].wrong("only type Localhost has it; leave it out")
