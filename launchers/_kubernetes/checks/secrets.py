"""Secrets: what they hold."""

import base64
import binascii
import re

from launchers._kubernetes.checks.metadata import size_of
from launchers._kubernetes.checks.places import Place, shown
from launchers._kubernetes.checks.values import data_key

_MOST_BYTES = 1 << 20
#: Keys that Secrets of a type must have.
_KEYS = {
    "kubernetes.io/tls": ("tls.crt", "tls.key"),
    "kubernetes.io/dockerconfigjson": (".dockerconfigjson",),
    "kubernetes.io/dockercfg": (".dockercfg",),
    "kubernetes.io/ssh-auth": ("ssh-privatekey",),
}


def check_secret(secret: Place) -> None:
    sizes: dict[str, int] = {}
    secret["data"].keys_obey(data_key)
    for key, each in secret["data"].entries:
        try:
            # The server skips ends of lines, as they stand in PEM files.
            sizes[key] = len(base64.b64decode(re.sub(r"[\r\n]", "", each.text), validate=True))
        except (binascii.Error, ValueError):
            each.wrong(f"{shown(each.value)} is no base64; encode the bytes, or use stringData")
    secret["stringData"].keys_obey(data_key)
    for key, each in secret["stringData"].entries:
        sizes[key] = size_of(each.text)
    total = sum(sizes.values())
    if total > _MOST_BYTES:
        secret["data"].wrong(
            f"{total} bytes in all; at most {_MOST_BYTES} are allowed; cut it into several Secrets"
        )
    for key in _KEYS.get(secret["type"].text, ()):
        if not secret["data"][key].given and not secret["stringData"][key].given:
            secret["data"].wrong(f"has no {key!r}, which type {secret['type'].text} needs")
