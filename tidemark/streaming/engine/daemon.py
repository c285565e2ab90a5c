"""The process from which Spark forks Python workers (`spark.python.daemon.module`). Imports the workers' modules first.

Spark's own daemon imports none of these modules, because a fork loses the threads of libraries. Then each worker takes
almost 1 s of CPU to import pandas and Arrow, at the start and after each minute without traffic. Environment variables
(streaming.engine.spark) keep these libraries from starting threads before the fork.
"""

if __name__ == "__main__":
    from pyspark import daemon, worker

    from tidemark.common.gc_tuning import freeze
    from tidemark.streaming.engine import query
    from tidemark.streaming.ingest import source

    imported = (source, query, worker)
    freeze()  # otherwise a worker's garbage collector would write to pages that it shares, and so copy them
    daemon.manager()
