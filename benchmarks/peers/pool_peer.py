"""The floor: `multiprocessing.Pool`, by hand, for just these two jobs."""

import bisect
import collections
import itertools
import multiprocessing
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import jobs

_BLOCK_BYTES = 16 << 20
_BUCKETS = 32

_Block = tuple[Path, int, int]


def _blocks(files: str) -> list[_Block]:
    return [
        (path, start, start + _BLOCK_BYTES)
        for path in jobs.paths(files)
        for start in range(0, path.stat().st_size, _BLOCK_BYTES)
    ]


def _lines(block: _Block) -> list[str]:
    path, start, end = block
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        data = file.read(max(0, end - file.tell()))
        if data and not data.endswith(b"\n"):
            data += file.readline()
    return data.decode().splitlines()


def _count(block: _Block) -> "collections.Counter[str]":
    counts: collections.Counter[str] = collections.Counter()
    for line in _lines(block):
        counts.update(line.split())
    return counts


def _sample(block: _Block) -> list[str]:
    return [line[:8] for line in random.sample(_lines(block)[:10_000], 100)]


def _divide(job: tuple[int, _Block, list[str], str]) -> None:
    number, block, bounds, scratch = job
    buckets: list[list[str]] = [[] for _ in range(_BUCKETS)]
    for line in _lines(block):
        buckets[bisect.bisect_left(bounds, line[:8])].append(line)
    for index, bucket in enumerate(buckets):
        Path(scratch, f"{index}-{number}").write_bytes(pickle.dumps(bucket, protocol=5))


def _sort(job: tuple[int, int, str, str]) -> None:
    index, blocks, scratch, folder = job

    def read() -> Iterator[str]:
        for number in range(blocks):
            path = Path(scratch, f"{index}-{number}")
            yield from pickle.loads(path.read_bytes())
            path.unlink()

    lines = sorted(read(), key=lambda line: line[:8])
    with Path(folder, f"{index:05}").open("w") as file:
        file.writelines(f"{line}\n" for line in lines)


class Pool(jobs.Engine):
    """Processes that are forked."""

    def start(self, workers: int, scratch: str) -> None:
        """Forks them."""
        self._scratch = scratch
        self._workers = workers
        self._pool = multiprocessing.get_context("fork").Pool(workers)
        self._pool.map(abs, range(workers))

    def word_count(self, files: str) -> dict[str, int]:
        """A counter for each block, added up."""
        total: collections.Counter[str] = collections.Counter()
        for counts in self._pool.imap_unordered(_count, _blocks(files)):
            total.update(counts)
        return total

    def sort(self, files: str, folder: str) -> None:
        """Divides lines among buckets by a sample of keys, then sorts each bucket."""
        blocks = _blocks(files)
        Path(folder).mkdir()
        some = random.sample(blocks, min(len(blocks), 4))
        keys = sorted(key for keys in self._pool.map(_sample, some) for key in keys)
        bounds = [keys[len(keys) * index // _BUCKETS] for index in range(1, _BUCKETS)]
        dividing = [(index, block, bounds, self._scratch) for index, block in enumerate(blocks)]
        self._pool.map(_divide, dividing, chunksize=1)
        sorting = [(index, len(blocks), self._scratch, folder) for index in range(_BUCKETS)]
        self._pool.map(_sort, sorting, chunksize=1)

    def sort_numbers(self, numbers: list[float]) -> None:
        """Sorts a part in each, then all parts here, which `sorted` finds to be in order."""
        size = -(-len(numbers) // self._workers)
        parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        sorted(itertools.chain(*self._pool.map(sorted, parts, chunksize=1)))

    def stop(self) -> None:
        """Ends them."""
        self._pool.terminate()


if __name__ == "__main__":
    jobs.main(Pool())
