"""Small searches without workers of their own, and workers that join them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launchpad_lite as lp
from launchpad_lite.parts.joining import JOIN_FILE
from launchpad_lite.search._model_node import ModelNode
from launchpad_lite.search._parts import RESTART, BrokerOptions, add_parts
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.models import Model
from tests.courier.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def searching(
    model: Model, folder: Path, *, launcher: str = "test_mt", workers: int = 0, **options: Any
) -> Iterator[Any]:
    """Runs a search in a block; gives a client of its model."""
    program = lp.Program("searched")
    timing = Timing()
    parts = add_parts(
        program,
        workers=workers,
        brokers=1,
        label="s",
        options=BrokerOptions(timing, str(folder)),
        **options,
    )
    node = lp.CourierNode(ModelNode, model, parts.name_server, parts.brokers, timing, None, True)
    handle = program.add_node(node, label="s_model")
    groups = ("s_broker", "s_name_server")
    running = lp.launch(program, launcher, restart=dict.fromkeys(groups, RESTART))
    try:
        wait_until((folder / JOIN_FILE).exists)
        yield handle.dereference()
    finally:
        running.stop()
        running.wait()


def start_worker(*arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """Starts a worker as users do."""
    return subprocess.Popen(
        [sys.executable, "-m", "launchpad_lite.search", "worker", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def worker(*arguments: object, **environment: str) -> "Iterator[subprocess.Popen[str]]":
    """Has a worker run in a block."""
    process = start_worker(*arguments, **environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def output_of(process: "subprocess.Popen[str]") -> str:
    """Waits for the end of a worker; returns what it has printed."""
    return process.communicate(timeout=30)[0]
