"""Windows that show the output of nodes, each its own."""

import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import launchpad_lite as lp
from launchpad.flags import FLAGS

_LOGGER = logging.getLogger(__name__)

#: The environment variable in place of the argument.
VARIABLE = "LAUNCHPAD_LAUNCH_LOCAL_TERMINAL"

#: Programs that open a window for a command, with the arguments before the title and the command.
_WINDOWS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "gnome-terminal": (("gnome-terminal", "--title"), ("--",)),
    "gnome-terminal-tabs": (("gnome-terminal", "--tab", "--title"), ("--",)),
    "xterm": (("xterm", "-title"), ("-e",)),
}
_SESSIONS = {"tmux_session": "tmux", "byobu_session": "byobu"}
_HERE = "current_terminal"
_FILES = "output_to_files"


def choose(terminal: str | None) -> str | None:
    """Returns the terminal for the output of processes: None means that of the script.

    `terminal` is `current_terminal`, `output_to_files`, `gnome-terminal`, `gnome-terminal-tabs`,
    `xterm`, `tmux_session` or `byobu_session`. None: that of LAUNCHPAD_LAUNCH_LOCAL_TERMINAL, or
    else `current_terminal`. A missing one is replaced by that, with a warning.
    """
    terminal = terminal or os.environ.get(VARIABLE) or _HERE
    known = (_HERE, _FILES, *_WINDOWS, *_SESSIONS)
    if terminal not in known:
        raise ValueError(f"no terminal {terminal!r}; known are {', '.join(known)}")
    if terminal == _HERE:
        return None
    if terminal == _FILES:
        return terminal
    program = _SESSIONS[terminal] if terminal in _SESSIONS else _WINDOWS[terminal][0][0]
    lacks = f"no {program}" if shutil.which(program) is None else ""
    if terminal in _WINDOWS and not os.environ.get("DISPLAY"):
        lacks = "no DISPLAY"
    if lacks:
        _LOGGER.warning("%s: there is %s here; the output of nodes comes here", terminal, lacks)
        return None
    return terminal


def show(terminal: str, running: lp.RunningProgram) -> None:
    """Opens a window for each node, as `choose` returned it. They close with the program."""
    nodes = [each.name for each in running.plan.executables]
    if terminal in _WINDOWS:
        before, after = _WINDOWS[terminal]
        for node in nodes:
            _start([*before, node, *after, *_reader(node)])
    elif terminal in _SESSIONS:
        _show_session(_SESSIONS[terminal], nodes)


def _reader(node: str) -> list[str]:
    return [sys.executable, "-m", "launchpad_lite.launch", "logs", "-f", str(os.getpid()), node]


def _show_session(program: str, nodes: Sequence[str]) -> None:
    wanted = str(FLAGS["tmux_session_name"].value)
    session, number = wanted, 0
    while _start([program, "has-session", "-t", f"={session}"]):
        session, number = f"{wanted}_{number}", number + 1
    for index, node in enumerate(nodes):
        name = node.replace("[", "/").rstrip("]")
        where = (
            ["new-session", "-s", session] if index == 0 else ["new-window", "-t", f"={session}:"]
        )
        _start([program, where[0], "-d", *where[1:], "-n", name, shlex.join(_reader(node))])
    if (window := FLAGS["tmux_open_window"].value) is not None:
        _start([program, "select-window", "-t", f"={session}:{window}"])
    _LOGGER.warning("the output of nodes is in: %s attach -t %s", program, session)


#: Windows whose programs stay until they close.
_open: list["subprocess.Popen[bytes]"] = []


def _start(command: Sequence[str]) -> bool:
    """Runs a command that returns soon, or whose window stays; returns whether it ended well."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nothing, stderr=nothing, start_new_session=True)
    if command[0] == "xterm":
        _open.append(process)
        return True
    return process.wait() == 0
