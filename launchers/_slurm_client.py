"""Slurm's commands, called."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from launchers._slurm_script import JobState, names_of, read_job
from launchpad_lite.errors import LaunchError

#: Seconds that a command has. Slurm's wait long for a controller that is busy.
_ANSWER_S = 60.0
#: The same for a submission, which continues trying by itself; ended, it may have happened or not.
_SUBMIT_S = 300.0


class SlurmError(LaunchError):
    """A command of Slurm failed; the message has what it said."""


def submit(script: Path) -> str:
    """Submits a batch script and returns the number of the job.

    Raises:
        SlurmError: Slurm does not take it.
    """
    answer = _call("sbatch", "--parsable", str(script), limit_s=_SUBMIT_S)
    # Warnings stand before, and the name of the cluster behind it.
    return answer.split()[-1].partition(";")[0]


def look_at(job: str) -> JobState | None:
    """Returns how a job is; None if Slurm has forgotten it.

    Raises:
        SlurmError: Slurm cannot be asked now.
    """
    try:
        return read_job(_call("scontrol", "--oneliner", "show", "job", job))
    except SlurmError as error:
        if re.search("invalid job id", str(error), re.IGNORECASE):
            return None
        raise
    except ValueError as error:
        raise SlurmError(str(error)) from error


def signal_script(job: str, signal: str) -> None:
    """Sends a signal to the script of a job, and to nothing else of it.

    Raises:
        SlurmError: It does not run.
    """
    _call("scancel", f"--signal={signal}", "--batch", job)


def cancel(job: str) -> None:
    """Ends a job: by SIGTERM, and some seconds later (Slurm's KillWait) by SIGKILL.

    Raises:
        SlurmError: Slurm does not take the command.
    """
    _call("scancel", job)


def requeue(job: str) -> None:
    """Makes a job run again from its beginning.

    Raises:
        SlurmError: It may not.
    """
    _call("scontrol", "requeue", job)


def host_names(expression: str) -> list[str]:
    """Returns the hosts that Slurm means by an expression like `h[1-3]`.

    Raises:
        SlurmError: It means nothing.
    """
    return names_of(_call("scontrol", "show", "hostnames", expression))


def _call(*command: str, limit_s: float = _ANSWER_S) -> str:
    done = _run(command, limit_s)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise SlurmError(f"{command[0]} failed with exit code {done.returncode}: {said}")
    return done.stdout


def _run(command: Sequence[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            # Ctrl-C is for the launcher.
            start_new_session=True,
            check=False,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"there is no {command[0]} on the PATH: launch from a login node of the cluster, or "
            "inside an allocation"
        ) from None
    except OSError as error:  # too many files or processes
        raise SlurmError(f"{command[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{command[0]} did not answer within {limit_s:.0f} s: is Slurm's controller up?"
        ) from None
