"""Sums up results of pytest: `python -m tests.summary FOLDER FILE`, both of junit XML.

Prints a line for each run, and the tests that took longest.
"""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

_LONGEST = 25


def main(folder: Path, file: Path) -> None:
    together = ET.Element("testsuites")
    print(f"\n{'run':20} {'tests':>6} {'failed':>6} {'skipped':>7} {'minutes':>7}")
    for path in sorted(folder.glob("*.xml")):
        for suite in ET.parse(path).getroot().iter("testsuite"):
            suite.set("name", path.stem)
            together.append(suite)
            tests, failures, errors, skipped = (
                int(suite.get(kind, 0)) for kind in ("tests", "failures", "errors", "skipped")
            )
            minutes = float(suite.get("time", 0)) / 60
            print(f"{path.stem:20} {tests:6} {failures + errors:6} {skipped:7} {minutes:7.1f}")
    ET.ElementTree(together).write(file)
    cases = sorted(together.iter("testcase"), key=_seconds, reverse=True)
    print(f"\nThe {_LONGEST} longest of {len(cases)}:")
    for case in cases[:_LONGEST]:
        print(f"{_seconds(case):6.1f} s  {case.get('classname')}::{case.get('name')}")


def _seconds(case: ET.Element) -> float:
    return float(case.get("time", 0))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
