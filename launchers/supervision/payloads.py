"""What the worker of each node must know."""

import sys

from launchers.host.worker import Payload
from launchpad_lite.launching import AddressTable, LaunchOptions, LaunchPlan
from launchpad_lite.process.flag_values import FlagSnapshot
from launchpad_lite.process.script import Script
from launchpad_lite.worker.address import OpenTable


def payloads(
    plan: LaunchPlan, table: AddressTable, options: LaunchOptions, *, has_terminal: bool = False
) -> dict[str, Payload]:
    """Returns the payload of each node's worker, at its first start."""
    flags, script, addresses = FlagSnapshot.take(), Script.here(), OpenTable.of(table)
    return {
        each.name: Payload(
            setup=each.setup(plan.program, 0, options.notice_s)._replace(has_terminal=has_terminal),
            work=each.work,
            addresses=addresses,
            argv=[*sys.argv, *each.process.flags()],
            flags=flags,
            script=script,
            own_flags=each.process.flags(),
        )
        for each in plan.executables
    }
