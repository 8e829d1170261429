"""How soon the page of 1,000 nodes is there, and how long it takes to draw new numbers.

    python -m benchmarks.dashboard --renewals=20

Needs Chromium. The nodes are told of, not started; each tells of its calls.
"""

import argparse
import statistics
from typing import Any, cast

from launchpad_lite.insight.dashboard import PageServer, ProgramPage
from launchpad_lite.testing import poll_until


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--renewals", type=int, default=20)
    options = parser.parse_args()
    # These need what tests need.
    from tests.beds.ssh_hosts import find_program
    from tests.launchpad_lite.insight.browser import browser
    from tests.launchpad_lite.insight.many import Many

    page = ProgramPage(cast("Any", Many(answering=1000)), None)
    with browser(str(find_program("chromium"))) as tab:
        tab.open(PageServer(page).url)
        poll_until(lambda: tab.evaluate("typeof took === 'object' && took.length > 0"))
        paint_ms = tab.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        enough = f"took.length > {options.renewals}"
        poll_until(lambda: tab.evaluate(enough), timeout_s=60.0 * options.renewals)
        first_ms, *later_ms = tab.evaluate("took")
    print(f"first paint after {paint_ms:.0f} ms; {first_ms:.0f} ms to draw the first numbers")
    print(f"{len(later_ms)} renewals: median {statistics.median(later_ms):.1f} ms", end=", ")
    print(f"slowest {max(later_ms):.0f} ms")


if __name__ == "__main__":
    main()
