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
        self._mr.load(files).sort_by(lambda line: line[:8]).save(folder)

    def sort_numbers(self, numbers: list[float]) -> None:
        """Three operations."""
        self._mr.load(numbers).sort_by(lambda number: number).collect()

    def stop(self) -> None:
        """Stops them."""
        self._mr.__exit__(None, None, None)


if __name__ == "__main__":
    jobs.main(MapReduce())
