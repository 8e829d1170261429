"""Nodes on several hosts, over plain OpenSSH."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchers.hosts.host_list import HostsChoice, HostSpec, mistakes_in_words
from launchers.hosts.launcher import HostsLauncher
from launchers.hosts.trust import Authority
from launchpad_lite.launching import Finding

__all__ = ["HostSpec", "SshLauncher"]

#: Keep-alive messages that ssh itself sends within the silence after which a host counts as lost.
_ALIVE_COUNT = 4


class SshLauncher(HostsLauncher):
    """Runs nodes on hosts that `ssh` reaches.

    It takes keys, jump hosts and names from the user's own `~/.ssh/config`.
    """

    def __init__(
        self, hosts: HostsChoice = (), *, ssh: str | Sequence[str] = "ssh", **options: Any
    ) -> None:
        """Prepares it, with hosts and options as for `HostsLauncher`; does not connect yet.

        `ssh` is the command, with any options of the user: words, or one text as in a shell.
        """
        super().__init__(hosts, **options)
        self._ssh = tuple(shlex.split(ssh) if isinstance(ssh, str) else ssh)
        if mistakes := [*mistakes_in_words(ssh=self._ssh[0] if self._ssh else "")]:
            raise ValueError("; ".join(mistakes))
        self.description = f"{len(self._specs)} hosts over SSH"

    def command(self, host: HostSpec, there: Sequence[str]) -> list[str]:
        options = {
            # Without it, ssh would prompt and wait for an answer that never comes.
            "BatchMode": "yes",
            "ConnectTimeout": f"{max(1, round(self._connect_s / 2))}",
            "ServerAliveInterval": f"{max(1, round(self._wanted.silence_s / _ALIVE_COUNT))}",
            "ServerAliveCountMax": f"{_ALIVE_COUNT}",
        }
        return [
            *self._ssh,
            "-T",
            *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
            *(("-p", str(host.port)) if host.port is not None else ()),
            "--",
            host.destination,
            f"exec {shlex.join(there)}",
        ]

    def checks(self) -> Mapping[str, Callable[[], Finding]]:
        """Returns a check of the command and the user's keys, and one for each host."""
        return {"ssh": self._check_command, **super().checks()}

    def _check_command(self) -> Finding:
        if shutil.which(self._ssh[0]) is None:
            return Finding("none", f"there is no {self._ssh[0]} on the PATH", "Install OpenSSH")
        Authority("doctor")  # raises if the package `cryptography` is missing
        command = ["ssh-add", "-l"]
        agent = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        text = f"ssh is there; its agent: {(agent.stdout or agent.stderr).strip()}"
        is_lost = agent.returncode > 1 and "SSH_AUTH_SOCK" in os.environ
        return Finding("warn", text, "Run ssh-agent") if is_lost else Finding("ok", text)
