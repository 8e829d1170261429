"""launchers: where programs run.

Each launcher is found by its name, in a table of `launchpad_lite.launching`; nothing here is
imported before it is asked for. No launcher imports another: what several
need stands in the private modules and in `launchers.host`.
"""

import launchpad_lite as _launchpad_lite  # noqa: F401 - refuses files of others in this package

__all__: list[str] = []
