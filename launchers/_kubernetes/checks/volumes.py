"""Volumes of a pod, and the places in containers where they are mounted."""

from collections.abc import Mapping

from launchers._kubernetes.checks import downward
from launchers._kubernetes.checks.places import (
    Needs,
    Place,
    Rules,
    apply,
    exactly_one,
    meant,
    need,
    shown,
    unique,
)
from launchers._kubernetes.checks.quantities import quantity
from launchers._kubernetes.checks.values import (
    absolute_path,
    between,
    data_key,
    dns_label,
    driver_name,
    host_path,
    image,
    medium,
    mode,
    mount_path,
    one_of,
    path_below,
    pull_policy,
    subdomain,
)

#: Sources of files each of which has a key, and of those that tell about the pod.
_KEYED = ("{secret,configMap}", "projected.sources[].{secret,configMap}")
_DOWNWARD = ("downwardAPI", "projected.sources[].downwardAPI")
_CLAIM = "ephemeral.volumeClaimTemplate"
_PROJECTIONS = (
    "secret",
    "configMap",
    "downwardAPI",
    "serviceAccountToken",
    "clusterTrustBundle",
    "podCertificate",
)
_FILE_TYPES = (
    "DirectoryOrCreate",
    "Directory",
    "FileOrCreate",
    "File",
    "Socket",
    "CharDevice",
    "BlockDevice",
)
_RULES: Rules = (
    ("name", dns_label),
    ("{secret,configMap,downwardAPI,projected}.defaultMode", mode),
    ("secret.secretName", subdomain),
    ("configMap.name", subdomain),
    ("projected.sources[].{secret,configMap}.name", subdomain),
    *((f"{source}.items[].key", data_key) for source in _KEYED),
    *((f"{source}.items[].path", path_below) for source in (*_KEYED, *_DOWNWARD)),
    *((f"{source}.items[].mode", mode) for source in (*_KEYED, *_DOWNWARD)),
    ("projected.sources[].serviceAccountToken.path", path_below),
    ("projected.sources[].serviceAccountToken.expirationSeconds", between(600, 2**32)),
    ("persistentVolumeClaim.claimName", subdomain),
    ("emptyDir.medium", medium),
    ("emptyDir.sizeLimit", quantity),
    ("hostPath.path", host_path),
    ("hostPath.type", one_of(*_FILE_TYPES)),
    ("nfs.path", absolute_path),
    ("csi.driver", driver_name),
    ("image.pullPolicy", pull_policy),
    ("image.reference", image),
    (
        f"{_CLAIM}.spec.accessModes[]",
        one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"),
    ),
    (f"{_CLAIM}.spec.volumeMode", one_of("Filesystem", "Block")),
    (f"{_CLAIM}.spec.storageClassName", subdomain),
    (f"{_CLAIM}.spec.resources.{{requests,limits}}.*", quantity),
)
_NEEDS: Needs = (
    ("secret", "secretName"),
    ("configMap", "name"),
    ("projected.sources[].{secret,configMap}", "name"),
    *((f"{source}.items[]", "key,path") for source in _KEYED),
    *((f"{source}.items[]", "path") for source in _DOWNWARD),
    ("projected.sources[].serviceAccountToken", "path"),
    ("persistentVolumeClaim", "claimName"),
    ("hostPath", "path"),
    ("nfs", "server,path"),
    ("csi", "driver"),
    ("image", "reference"),
    ("ephemeral", "volumeClaimTemplate"),
    (_CLAIM, "spec"),
    (f"{_CLAIM}.spec", "accessModes"),
    (f"{_CLAIM}.spec.resources.requests", "storage"),
)
_MOUNT_RULES: Rules = (
    ("volumeMounts[].mountPath", mount_path),
    ("volumeMounts[].{subPath,subPathExpr}", path_below),
    ("volumeMounts[].mountPropagation", one_of("None", "HostToContainer", "Bidirectional")),
    ("volumeMounts[].recursiveReadOnly", one_of("Disabled", "IfPossible", "Enabled")),
    ("volumeDevices[].devicePath", absolute_path),
)
_MOUNT_NEEDS: Needs = (
    ("volumeMounts[]", "name,mountPath"),
    ("volumeDevices[]", "name,devicePath"),
)


def check_volume(volume: Place) -> None:
    need(volume, [("", "name")])
    sources = [key for key, each in volume.entries if key != "name" and each.given]
    if not sources:
        volume.wrong("source is missing; give one, like emptyDir: {}")
    elif len(sources) > 1:
        volume.wrong(f"{' and '.join(sources)} are given; a volume has only one source")
    apply(volume, _RULES)
    need(volume, _NEEDS)
    for source in volume["projected"]["sources"].elements:
        exactly_one(source, _PROJECTIONS, "source")
    files = [
        *volume.select("{secret,configMap,downwardAPI}.items[].path"),
        *volume.select("projected.sources[].{secret,configMap,downwardAPI}.items[].path"),
        *volume.select("projected.sources[].{serviceAccountToken,clusterTrustBundle}.path"),
    ]
    unique(files, "give each file its own path")
    for item in (each for told in _DOWNWARD for each in volume.select(f"{told}.items[]")):
        exactly_one(item, ("fieldRef", "resourceFieldRef"), "source")
        downward.check_file(item)


def check_mounts(container: Place, volumes: Mapping[str, Place]) -> None:
    """Checks what a container mounts.

    Args:
        container: The container.
        volumes: The pod's volumes by name.
    """
    apply(container, _MOUNT_RULES)
    need(container, _MOUNT_NEEDS)
    unique(container.select("volumeMounts[].mountPath"), "mount one volume at each path")
    unique(container.select("volumeDevices[].devicePath"), "take one device for each path")
    for name in container.select("{volumeMounts,volumeDevices}[].name"):
        if name.text and name.text not in volumes:
            known = sorted(filter(None, volumes))
            hint = meant(name.text, known) if known else "there is none"
            name.wrong(f"{shown(name.value)} is no volume of the pod; {hint}")
    for name in container.select("volumeDevices[].name"):
        volume = volumes.get(name.text)
        if volume and not volume["persistentVolumeClaim"].given and not volume["ephemeral"].given:
            name.wrong("is no claim; devices are persistentVolumeClaim or ephemeral")
    for mount in container["volumeMounts"].elements:
        _check_options(mount, privileged=container["securityContext"]["privileged"].value is True)


def _check_options(mount: Place, *, privileged: bool) -> None:
    if mount["subPath"].text and mount["subPathExpr"].text:
        mount["subPathExpr"].wrong("does not go with subPath; leave one out")
    if mount["recursiveReadOnly"].text not in ("", "Disabled"):
        if mount["readOnly"].value is not True:
            mount["recursiveReadOnly"].wrong("needs readOnly: true")
    if mount["mountPropagation"].value == "Bidirectional" and not privileged:
        mount["mountPropagation"].wrong("'Bidirectional' needs a privileged container")
