"""The sentence in which a program says why it ended."""

import pytest

from tidemark.common.environment import MAX_CAUSE_LENGTH, failure_cause

SPARK = """\
NOTE: Picked up JDK_JAVA_OPTIONS: -XX:+UseSerialGC
WARNING: Using incubator modules: jdk.incubator.vector
Exception in thread "main" org.apache.spark.SparkException: Cannot load main class
	at org.apache.spark.deploy.SparkSubmitArguments.error(SparkSubmitArguments.scala:650)
Caused by: java.io.FileNotFoundException: File file:/tmp/spark-events does not exist
	at org.apache.hadoop.fs.RawLocalFileSystem.deprecatedGetFileStatus(RawLocalFileSystem.java:917)
	at java.base/java.lang.Thread.run(Thread.java:840)
	... 14 more
"""
COLLECTORS = """\
Error occurred during initialization of VM
Multiple garbage collectors selected; please use only one
"""
OPTION = """\
Unrecognized VM option 'UseNoGC'
Error: Could not create the Java Virtual Machine.
Error: A fatal exception has occurred. Program will exit.
"""
POSTGRES = """\
2026-11-26 00:12:39.512 UTC [812] LOG:  starting PostgreSQL 18.0
2026-11-26 00:12:39.520 UTC [812] FATAL:  could not create lock file "postmaster.pid": Permission denied
2026-11-26 00:12:39.530 UTC [812] LOG:  database system is shut down
"""
PYTHON = """\
Traceback (most recent call last):
  File "x.py", line 3, in <module>
    raise ValueError("no disk")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: no disk
"""
KAFKA = """\
[2026-11-26 00:12:39,520] ERROR Exiting Kafka due to fatal exception (kafka.Kafka$)
java.lang.RuntimeException: No readable meta.properties files found.
	at org.apache.kafka.metadata.properties.MetaPropertiesEnsemble.verify(MetaPropertiesEnsemble.java:507)
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (SPARK, "java.io.FileNotFoundException: File file:/tmp/spark-events does not exist"),
        (COLLECTORS, "Multiple garbage collectors selected; please use only one"),
        (OPTION, "Unrecognized VM option 'UseNoGC'"),
        (POSTGRES, 'could not create lock file "postmaster.pid": Permission denied'),
        (PYTHON, "ValueError: no disk"),
        (KAFKA, "java.lang.RuntimeException: No readable meta.properties files found."),
        ("Error: the port is taken\n", "Error: the port is taken"),
        ("goodbye\n", "goodbye"),
        ("", ""),
    ],
)
def test_the_cause_is_a_sentence_of_the_program(output: str, cause: str) -> None:
    """Not a stack frame, a time stamp or the JVM's own advice."""
    assert failure_cause(output.splitlines()) == cause


def test_a_cause_is_cut_to_a_line_that_a_person_reads() -> None:
    """Some libraries put a whole query into their error."""
    assert len(failure_cause(["error " * MAX_CAUSE_LENGTH])) == MAX_CAUSE_LENGTH
