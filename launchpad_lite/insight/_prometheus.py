"""Numbers of a program in the text format of Prometheus."""

from collections.abc import Iterator

from launchpad_lite.insight._view import ProgramSight

Sample = tuple[str, str, dict[str, str], float]  # the name, what follows it, labels, the value


def as_prometheus(sight: ProgramSight) -> str:
    """Returns all numbers of the nodes; those of one name stand together, as the format demands."""
    found: dict[str, list[str]] = {}
    for name, rest, labels, value in _samples(sight):
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        found.setdefault(name, []).append(f"{name}{rest}{{{inner}}} {float(value):.12g}\n")
    kinds = {"total": "counter", "histogram": "histogram"}
    return "".join(
        f"# TYPE {name} {kinds.get(name.rpartition('_')[2], 'gauge')}\n{''.join(lines)}"
        for name, lines in found.items()
    )


def _samples(sight: ProgramSight) -> Iterator[Sample]:
    for status, rates, _, numbers in sight.rows:
        node = {"node": status.name}
        yield "launchpad_node_state", "", {**node, "state": status.state}, 1
        yield "launchpad_node_restarts_total", "", node, status.restarts
        for name, value, unit in (
            ("cores", status.cpu, 1),
            ("memory_bytes", status.memory_mib, 1 << 20),
            ("gpu_memory_bytes", status.gpu_memory_mib, 1 << 20),
            ("queued", rates.queued, 1),
        ):
            if value is not None:
                yield f"launchpad_node_{name}", "", node, value * unit
        for side, methods in (numbers.get("calls") or {}).items():
            for method, each in methods.items():
                for name, key in (("", "calls"), ("_errors", "errors"), ("_seconds", "seconds")):
                    labels = {**node, "method": method}
                    yield f"launchpad_calls_{side}{name}_total", "", labels, each[key]
        metrics = numbers.get("metrics") or {}
        for kind, end in (("counter", "_total"), ("gauge", ""), ("log", "")):
            for name, value in metrics.get(kind, {}).items():
                if value is not None:
                    yield f"launchpad_{kind}{end}", "", {**node, "name": name}, value
        for metric, each in metrics.get("histogram", {}).items():
            labels, below = {**node, "name": metric}, 0
            for bound, count in (*each["buckets"], ("+Inf", 0)):
                below += count
                yield "launchpad_histogram", "_bucket", {**labels, "le": str(bound)}, below
            yield "launchpad_histogram", "_sum", labels, each["sum"]
            yield "launchpad_histogram", "_count", labels, each["count"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
