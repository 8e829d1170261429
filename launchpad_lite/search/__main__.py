"""`python -m launchpad_lite.search`; see `launchpad_lite.search._command_line`."""

import sys

if __name__ == "__main__":
    from launchpad_lite.search._command_line import main

    sys.exit(main())
