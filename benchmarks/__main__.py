"""Measures courier beside its peers, in one run.

    python -m benchmarks --peers=courier,floor,ray --cases=echo,arrays --rounds=5

In each round of each case the peers take turns. Ratios are taken within a round. A run of everything writes its tables and its plot
to docs/, and takes up to 15 minutes on two quiet cores; any other run only prints them.
"""

import argparse
import datetime as dt
import time
from collections.abc import Sequence

from benchmarks import plot, report
from benchmarks.cases import CASES, FULL, QUICK, Case, Effort, Session
from benchmarks.environments import PEERS, AbsentError, Installed, install_all, machine, revision
from benchmarks.namespaces import Namespaces
from benchmarks.processes import PeerError, adopt_orphans, end_orphans
from benchmarks.report import Results


def main() -> None:
    """Runs the rounds, prints tables, writes the page."""
    options = _parse()
    adopt_orphans()
    wanted = [peer for peer in PEERS if peer.name in options.peers]
    installed, absent = install_all(wanted)
    results = Results(absent=absent)
    namespaces = _make_namespaces(options.cases, results)
    try:
        for case in options.cases:
            if not case.tls or namespaces is not None:
                peers = [one for one in installed if one.peer.tls or not case.tls]
                _run_case(case, peers, options.rounds, options.effort, namespaces, results)
    finally:
        end_orphans()
        if namespaces is not None:
            namespaces.close()
    today = dt.datetime.now(dt.timezone.utc).date()
    extent = "a quick run, " if options.effort is QUICK else ""
    generated = (
        f"Measured {today}: {extent}median of {options.rounds} rounds, commit {revision()}, "
        f"{machine()}.\n\n{report.versions(installed)}\n{report.markdown(results, wanted)}"
    )
    print(generated)
    if options.write:
        report.write(generated)
        report.PLOT.write_text(plot.svg(results, wanted))


def _make_namespaces(cases: Sequence[Case], results: Results) -> Namespaces | None:
    if not any(case.tls for case in cases):
        return None
    try:
        return Namespaces()
    except AbsentError as error:
        for case in cases:
            if case.tls:
                results.reasons[case.name, "all"] = str(error)
        return None


def _run_case(
    case: Case,
    peers: Sequence[Installed],
    rounds: int,
    effort: Effort,
    namespaces: Namespaces | None,
    results: Results,
) -> None:
    """Measures each peer once per round; gives up on a peer that fails."""
    for number in range(rounds):
        # Another peer comes first, and each second round runs backwards, so that no place in the row
        # and no neighbour is an advantage.
        first = number * len(peers) // rounds
        forwards = [*peers[first:], *peers[:first]]
        backwards = [*peers[first::-1], *peers[:first:-1]]
        for one in backwards if number % 2 else forwards:
            name = one.peer.name
            if (case.name, name) in results.reasons:
                continue
            values: list[float] = []
            begun_at = time.monotonic()
            try:
                with Session(one, effort, namespaces if case.tls else None) as session:
                    # Keeps what came before a failure.
                    values.extend(case.measure(session))
            except PeerError as error:
                results.reasons[case.name, name] = str(error)
                for metric in case.metrics[len(values) :]:
                    results.values.pop((metric.name, name), None)
            # A quick run ends before the largest arrays.
            for metric, value in zip(case.metrics, values, strict=False):
                results.values.setdefault((metric.name, name), []).append(value)
            reason = results.reasons.get((case.name, name), "")
            shown = " ".join([*map(report.number, values), reason]).rstrip()
            end_orphans()
            took_s = time.monotonic() - begun_at
            print(f"{case.name} {number + 1}/{rounds} {name}: {shown} ({took_s:.1f} s)", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    peers = [peer.name for peer in PEERS]
    cases = {case.name: case for case in CASES}
    parser.add_argument("--peers", help=f"some of {','.join(peers)}")
    parser.add_argument("--cases", help=f"some of {','.join(cases)}")
    parser.add_argument("--rounds", type=int, help="3 if not quick")
    parser.add_argument("--quick", action="store_true", help="does little, to see that all works")
    parser.add_argument("--no-write", action="store_true", help="leaves docs/ alone")
    options = parser.parse_args()
    everything = not (options.peers or options.cases or options.quick)
    options.write = everything and not options.no_write
    options.effort = QUICK if options.quick else FULL
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.peers = options.peers.split(",") if options.peers else peers
    chosen = options.cases.split(",") if options.cases else list(cases)
    for kind, names, known in (("peer", options.peers, peers), ("case", chosen, cases)):
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    options.cases = [cases[name] for name in chosen]
    return options


if __name__ == "__main__":
    main()
