"""Examples as users run them: in processes of their own, from the root of the checkout."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str, timeout_s: float = 110.0) -> "subprocess.CompletedProcess[str]":
    """Runs Python with arguments, to its end."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


def run_example(
    name: str, *arguments: str, timeout_s: float = 110.0
) -> "subprocess.CompletedProcess[str]":
    """Runs the script of an example."""
    return run_python("-m", f"examples.{name}.launch", *arguments, timeout_s=timeout_s)
