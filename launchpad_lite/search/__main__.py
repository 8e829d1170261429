"""`python -m launchpad_lite.search`; see `launchpad_lite.search._command_line`."""

import sys

if __name__ == "__main__":
    from launchpad_lite.launching import stand_in
    from launchpad_lite.search._command_line import main

    stand_in()  # what the scripts of tasks define is found in it
    sys.exit(main())
