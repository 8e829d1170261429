"""PySpark, RDDs of one process that has some cores."""

import operator

import jobs
from pyspark import SparkConf, SparkContext


class Spark(jobs.Engine):
    """A Java process, and Python processes that it starts."""

    def start(self, workers: int, scratch: str) -> None:
        """Starts them."""
        conf = SparkConf().setMaster(f"local[{workers}]").set("spark.local.dir", scratch)
        conf.set("spark.driver.memory", "4g").set("spark.ui.enabled", "false")
        self._context = SparkContext(conf=conf)
        self._context.parallelize(range(workers), workers).count()

    def word_count(self, files: str) -> dict[str, int]:
        """As its documentation does it."""
        words = self._context.textFile(files).flatMap(str.split)
        return dict(words.map(lambda word: (word, 1)).reduceByKey(operator.add).collect())

    def sort(self, files: str, folder: str) -> None:
        """As its documentation does it."""
        keyed = self._context.textFile(files).map(lambda line: (line[:8], line))
        keyed.sortByKey().values().saveAsTextFile(folder)

    def stop(self) -> None:
        """Stops them."""
        self._context.stop()


if __name__ == "__main__":
    jobs.main(Spark())
