"""The process from which Spark forks Python workers (`spark.python.daemon.module`). It has imported what they need.

Spark's own daemon imports nothing, because a thread of a library would be lost in a fork. Then each worker takes most
of a second of CPU to import pandas and Arrow, at the start and after each minute without traffic. The environment
(streaming.engine.spark) keeps these libraries from starting threads before the fork.
"""

if __name__ == "__main__":
    from pyspark import daemon, worker

    from tidemark.common.gc_tuning import freeze
    from tidemark.streaming.engine import query
    from tidemark.streaming.ingest import source

    imported = (source, query, worker)
    freeze()  # otherwise a worker's garbage collector would write to shared pages, and so copy them
    daemon.manager()
