"""No workers at all: `sorted` and `Counter`, in one process."""

import collections
import itertools
from collections.abc import Iterator
from pathlib import Path

import jobs


def _lines(files: str) -> Iterator[str]:
    for path in jobs.paths(files):
        with path.open() as file:
            yield from file


class Sorted(jobs.Engine):
    """This process."""

    def start(self, workers: int, scratch: str) -> None:
        """Does nothing."""

    def word_count(self, files: str) -> dict[str, int]:
        """One counter."""
        return collections.Counter(itertools.chain.from_iterable(map(str.split, _lines(files))))

    def sort(self, files: str, folder: str) -> None:
        """Has all lines in memory."""
        lines = sorted(_lines(files), key=lambda line: line[:8])
        Path(folder).mkdir()
        with Path(folder, "all").open("w") as file:
            file.writelines(lines)

    def sort_numbers(self, numbers: list[float]) -> None:
        """One call."""
        sorted(numbers)


if __name__ == "__main__":
    jobs.main(Sorted())
