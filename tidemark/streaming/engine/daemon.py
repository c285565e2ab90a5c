"""The process that Spark forks Python workers from, which has imported what they need: `spark.python.daemon.module`.

Spark's own daemon imports nothing, so that no thread of a library is lost in a fork; each worker of it takes most of a
second of a core to import pandas and Arrow, at the start and after every minute without traffic. Here the libraries are
told by their environment (streaming.engine.spark) to start no thread before the fork.
"""

if __name__ == "__main__":
    from pyspark import daemon, worker

    from tidemark.common.gc_tuning import freeze
    from tidemark.streaming.engine import query
    from tidemark.streaming.ingest import source

    imported = (source, query, worker)
    freeze()  # no worker's collector touches, and so copies, the pages that all share
    daemon.manager()
