"""`python -m launchpad_lite.launch`; see `launchpad_lite.cli.command_line`."""

import sys

if __name__ == "__main__":
    from launchpad_lite.cli.command_line import main

    sys.exit(main())

# `lp.launch` is a function, and this file must have its name for `python -m`. Importing a
# submodule sets it as an attribute of its package; this module replaces itself by the function, so
# that the function is never lost.
sys.modules[__name__] = sys.modules["launchpad_lite"].launch
