"""The map-reduce engine of this project, as its documentation shows it."""

import collections
import operator

import jobs

from launchpad_lite import engines


class MapReduce(jobs.Engine):
    """Workers as processes."""

    def start(self, workers: int, scratch: str) -> None:
        """Launches them."""
        self._mr = engines.MapReduce(workers, spill_folder=scratch, progress=False)
        self._mr.__enter__()
        self._mr.load(range(workers), partitions=workers).count()

    def word_count(self, files: str) -> dict[str, int]:
        """Three operations; words are counted before they are sent, as Dask does it."""
        words = self._mr.load(files).flat_map(str.split)
        counts = words.map_partitions(lambda words: collections.Counter(words).items())
        return dict(counts.reduce_by_key(operator.add).collect())

    def sort(self, files: str, folder: str) -> None:
        """Three operations."""
        keyed = self._mr.load(files).map(lambda line: (line[:8], line))
        keyed.sort_by_key().map(lambda item: item[1]).save(folder)

    def stop(self) -> None:
        """Stops them."""
        self._mr.__exit__(None, None, None)


if __name__ == "__main__":
    jobs.main(MapReduce())
