"""Generators that join running rollouts from outside of their program."""

import secrets
from pathlib import Path
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.parts.joining import JoinInfo
from launchpad_lite.parts.settings import check_number
from launchpad_lite.rollouts._generating import GeneratorNode, ReturningNode
from launchpad_lite.rollouts._patience import SILENT_S
from launchpad_lite.rollouts.errors import RolloutsError
from launchpad_lite.rollouts.weights import WeightsClient

#: Seconds between two looks whether the rollouts go on, and for which they may be gone.
_LOOK_S, _GONE_S = 1.0, 30.0


def join(file: Path, generators: int = 1) -> lp.Program:
    """Returns a program with more generators for rollouts that run. It ends after them.

    Launch it where and when there is room, and stop it at any time: what its generators had begun
    is made again by others. They are those of `Rollouts.add_to`; each reads the file on its host.

    Args:
        file: `join.json`, in the folder that `Rollouts.add_to` got.
        generators: How many.

    Raises:
        RolloutsError: There is no such file, or no such rollouts run.
        ValueError: The number is below 1.

    Example:
        lp.launch(rollouts.join("runs/1/join.json", generators=2), "local_mp").wait()
    """
    check_number("join: generators", generators, 1)
    path = str(Path(file).absolute())
    _ask(path)
    program = lp.Program("joined")
    label = f"joined_{secrets.token_hex(3)}"  # others may join, too
    for _ in range(generators):
        program.add_node(ReturningNode(_make_generator, path), label=label)
    program.add_node(lp.PyNode(_wait_for_end, path), label="rollouts_watch")
    return program


def _ask(file: str) -> tuple[Any, Any]:
    """Returns a client of the buffer, and what generators are made of."""
    # In each node: only who has read the file holds the secret with which clients can be unpickled.
    info = JoinInfo.read(Path(file), "a program with rollouts", RolloutsError)
    buffer = info.connect(name="rollouts")
    try:
        return buffer, courier.with_timeout(buffer, SILENT_S).for_generators()
    except courier.CourierError as error:
        raise RolloutsError(
            f"no rollouts answer at {info.address}: their program has ended, or this machine does not "
            f"reach it ({error})"
        ) from error


def _make_generator(file: str) -> GeneratorNode:
    buffer, (generator, of_weights, threads, leased, options) = _ask(file)
    weights = WeightsClient(*of_weights)
    return GeneratorNode(buffer, weights, generator, threads, leased, **options)


def _wait_for_end(file: str) -> None:
    """Returns when the rollouts have ended, or this program is to stop."""
    asked, gone_s = courier.with_timeout(_ask(file)[0], _LOOK_S), 0.0
    while gone_s < _GONE_S and not lp.wait_for_stop(_LOOK_S):
        try:
            asked.status()
            gone_s = 0.0
        except courier.CourierError:  # it may be starting again
            gone_s += _LOOK_S if Path(file).exists() else _GONE_S
