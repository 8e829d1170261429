"""Replaces a forked worker by a new interpreter, whose start takes some 50 ms more.

For nodes that want another Python, or variables that are read only when an interpreter starts.
"""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NoReturn

from launchers.host.stacks import write_stacks_on_signal
from launchers.host.worker import leave, prepare_output, run_worker

_ZIPPED_LIBRARY = re.compile(r"python\d+\.zip")
#: Uses only built-ins before the two checks: our packages may be missing, or of another version.
_BOOT = """\
import sys
control, payload, stacks = map(int, sys.argv[1:4])
local, version, wanted = eval(sys.argv[4]), sys.version_info[:2], eval(sys.argv[5])
del sys.argv[1:]
if version != wanted:
    sys.exit("%s is Python %d.%d, the program was launched by %d.%d: code travels between the same "
             "minor versions only" % ((sys.executable,) + version + wanted))
sys.path[:] = local + [path for path in sys.path if path and path not in local]
try:
    from launchers.host.interpreter import go_on
except ImportError as error:
    sys.exit("%s cannot run nodes (%s); install the package there: %s -m pip install launchpad-lite"
             % (sys.executable, error, sys.executable))
go_on(control, payload, stacks)
"""


def begin_anew(
    interpreter: str | None, payload: bytes, control_fd: int, stacks_fd: int
) -> NoReturn:
    """Replaces this forked worker by a new interpreter, as the same process, with its payload."""
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.flush()
        payload_fd = os.dup(file.fileno())
    os.lseek(payload_fd, 0, os.SEEK_SET)
    fds = (control_fd, payload_fd, stacks_fd)
    for fd in fds:
        os.set_inheritable(fd, True)
    program = (interpreter and shutil.which(interpreter)) or interpreter or sys.executable
    known = [repr(_local_path()), repr(sys.version_info[:2])]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [program, *flags, "-c", _BOOT, *map(str, fds), *known]
    os.execv(program, command)  # noqa: S606 - no shell is wanted


def _local_path() -> list[str]:
    """Returns the folders of the user's own code; each interpreter has its own installed packages."""
    installed = {
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    return [
        folder
        for folder in map(str, sys.path)
        if folder
        and not _ZIPPED_LIBRARY.fullmatch(Path(folder).name)
        and not any(Path(folder).is_relative_to(each) for each in installed)
    ]


def go_on(control_fd: int, payload_fd: int, stacks_fd: int) -> NoReturn:
    """Does in the new interpreter what a forked worker does."""
    code = 1
    try:
        for fd in (control_fd, payload_fd, stacks_fd):
            os.set_inheritable(fd, False)
        prepare_output()
        write_stacks_on_signal(stacks_fd)
        with open(payload_fd, "rb") as file:
            payload = file.read()
        code = run_worker(payload, control_fd, stacks_fd)
    except BaseException:  # noqa: BLE001 - what it printed last is shown
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)
