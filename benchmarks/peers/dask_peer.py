"""Dask bag, with its default for bags: a pool of processes for each job."""

import dask
import dask.bag
import harness
import jobs


class Dask(jobs.Engine):
    """Processes that start with each job."""

    def start(self, workers: int, scratch: str) -> None:
        """Sets how many, and has them do something."""
        dask.config.set(num_workers=workers, temporary_directory=scratch)
        dask.bag.from_sequence(range(workers)).count().compute()

    def word_count(self, files: str) -> dict[str, int]:
        """As its documentation does it."""
        lines = dask.bag.read_text(files, blocksize=1 << 24)
        return dict(lines.map(str.split).flatten().frequencies().compute())

    def sort(self, files: str, folder: str) -> None:  # noqa: ARG002 - as for all
        """Bags cannot be sorted."""
        raise harness.UnsupportedError("cannot")


if __name__ == "__main__":
    jobs.main(Dask())
