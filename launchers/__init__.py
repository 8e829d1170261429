"""launchers: where programs run.

Each launcher is found by its name, in a table of `launchpad_lite.launching`; nothing here is
imported before it is asked for. No launcher imports another: what several
need stands in the private modules and in `launchers.host`.
"""

__all__: list[str] = []
