"""Ray Data."""

import jobs
import ray


class RayData(jobs.Engine):
    """A cluster on this machine."""

    def start(self, workers: int, scratch: str) -> None:  # noqa: ARG002 - its paths have to be short
        """Starts it."""
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        ray.data.range(workers).count()

    def word_count(self, files: str) -> dict[str, int]:
        """As its documentation does it."""
        lines = _read(files)
        words = lines.flat_map(lambda row: [{"word": word} for word in row["text"].split()])
        return {row["word"]: row["count()"] for row in words.groupby("word").count().take_all()}

    def sort(self, files: str, folder: str) -> None:
        """As its documentation does it; rows have no order but that of whole columns."""
        _read(files).sort("text").write_csv(folder)

    def stop(self) -> None:
        """Stops it."""
        ray.shutdown()


def _read(files: str) -> ray.data.Dataset:
    return ray.data.read_text([str(path) for path in jobs.paths(files)])


if __name__ == "__main__":
    jobs.main(RayData())
