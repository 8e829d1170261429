"""Word count and k-means on the map-reduce engine.

`examples/map_reduce` counts words with mappers and reducers of its own, as in the Launchpad paper;
here the engine does the same in a few lines.
"""

import operator
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launchpad_lite import engines

Points = npt.NDArray[np.float64]

#: Two letters or more: single ones are mostly names in code.
_WORD = re.compile(r"[^\W\d_]{2,}")


def library() -> str:
    """Returns a pattern of text files that every machine has: the Python standard library."""
    return str(Path(sysconfig.get_path("stdlib")) / "*.py")


def count_words(mr: engines.MapReduce, pattern: str) -> list[tuple[str, int]]:
    """Returns each word of some files and how often it is there, the most frequent first."""
    words = mr.load(pattern).flat_map(_WORD.findall).map(str.lower)
    counts = words.map(lambda word: (word, 1)).reduce_by_key(operator.add)
    ranked = counts.map(lambda item: (item[1], item[0])).sort_by_key(reverse=True)
    return ranked.map(lambda item: (item[1], item[0])).collect()


def blobs(clusters: int, points: int, dimension: int, seed: int) -> tuple[Points, Points]:
    """Returns points in clusters, shape (points, dimension), and the centres of these."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-10, 10, size=(clusters, dimension))
    return centres[rng.integers(clusters, size=points)] + rng.normal(
        size=(points, dimension)
    ), centres


def k_means(
    mr: engines.MapReduce, points: Points, clusters: int, iterations: int, seed: int = 0
) -> tuple[Points, list[float]]:
    """Returns centres of clusters, shape (clusters, dimension), and the inertia of each iteration.

    The points are cut into blocks, sent once, and stay with the workers. Each iteration sends the
    centres, and gets back a sum and a count for each cluster.
    """
    rng = np.random.default_rng(seed)
    centres = points[rng.choice(len(points), size=clusters, replace=False)]
    blocks = mr.load(np.array_split(points, 32)).cache()
    inertia: list[float] = []
    for _ in range(iterations):
        now = mr.broadcast(centres)

        def assign(arrays: Iterable[Points], now: engines.Broadcast[Points] = now) -> Iterator[Any]:
            for array in arrays:
                distances = ((array[:, None] - now.value) ** 2).sum(axis=2)
                nearest = distances.argmin(axis=1)
                # Not np.unique: its first use imports numpy.ma, which may fail in two threads at once.
                for cluster in sorted(set(nearest.tolist())):
                    own = nearest == cluster
                    yield (
                        cluster,
                        (array[own].sum(axis=0), own.sum(), distances[own, cluster].sum()),
                    )

        sums = blocks.map_partitions(assign).reduce_by_key(
            lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
        )
        inertia.append(0.0)
        for cluster, (total, count, error) in sums.collect():
            centres = centres.copy()
            centres[cluster] = total / count
            inertia[-1] += float(error)
    blocks.uncache()
    return centres, inertia
