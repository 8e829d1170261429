"""What the worker of each node must know."""

import sys

from launchers.host.worker import Payload
from launchpad_lite._flag_values import FlagSnapshot
from launchpad_lite._script import Script
from launchpad_lite.launching import AddressTable, LaunchOptions, LaunchPlan


def payloads(plan: LaunchPlan, table: AddressTable, options: LaunchOptions) -> dict[str, Payload]:
    """Returns the payload of each node's worker, at its first start.

    Args:
        plan: What is launched.
        table: Where its nodes listen.
        options: How it is launched.
    """
    flags, script = FlagSnapshot.take(), Script.here()
    tls = table.tls
    return {
        each.name: Payload(
            setup=each.setup(plan.program, 0, options.notice_s),
            work=each.work,
            endpoints=dict(table.endpoints),
            secret=table.secret.reveal(),
            argv=[*sys.argv, *each.process.flags()],
            flags=flags,
            script=script,
            own_flags=each.process.flags(),
            listen_host=table.listen_host,
            certificates=None if tls is None else (tls.certificate, tls.key, tls.authority),
        )
        for each in plan.executables
    }
