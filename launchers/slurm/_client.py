"""Slurm's commands, called."""

import re
import subprocess
from pathlib import Path

from launchers.slurm._script import JobState, read_job
from launchpad_lite.errors import LaunchError

#: Time limit of a command in seconds. Slurm's commands wait long for a busy controller.
_ANSWER_S = 60.0
#: The same for a submission. `sbatch` repeats it by itself, and after a time-out it is unknown
#: whether the job was submitted.
_SUBMIT_S = 300.0


class SlurmError(LaunchError):
    """A command of Slurm failed; the message has its output."""


def submit(script: Path) -> str:
    answer = call("sbatch", "--parsable", str(script), limit_s=_SUBMIT_S)
    # Warnings come before the number, and the name of the cluster after it.
    return answer.split()[-1].partition(";")[0]


def look_at(job: str) -> JobState | None:
    """Returns the state of a job; None if Slurm does not know it any more."""
    try:
        return read_job(call("scontrol", "--oneliner", "show", "job", job))
    except SlurmError as error:
        if re.search("invalid job id", str(error), re.IGNORECASE):
            return None
        raise
    except ValueError as error:
        raise SlurmError(str(error)) from error


def call(*command: str, limit_s: float = _ANSWER_S) -> str:
    """Runs a command of Slurm and returns what it prints; raises SlurmError if it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            # In a session of its own, so that Ctrl-C reaches only the launcher.
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
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise SlurmError(f"{command[0]} failed with exit code {done.returncode}: {said}")
    return done.stdout
