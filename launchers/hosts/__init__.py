"""Launchers of programs on several hosts, which a command reaches.

A subclass of `HostsLauncher` says which hosts there are and which command reaches one of them: ssh, or the
command of a batch system or a container engine. This folder does the rest: it sends code to the hosts,
places and supervises the nodes, and may move a node whose host is lost to another host.
"""

from typing import TYPE_CHECKING

from courier.lowlevel import later

# Loaded at first use: most modules that import a part of this folder need no launcher.
if TYPE_CHECKING:
    from launchers.hosts.host_list import HostSpec
    from launchers.hosts.launcher import HostsLauncher
else:
    __getattr__, __dir__ = later(
        globals(), {".host_list": "HostSpec", ".launcher": "HostsLauncher"}
    )

__all__ = ["HostSpec", "HostsLauncher"]
