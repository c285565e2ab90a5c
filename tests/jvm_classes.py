"""Brokers of tests begin with archived classes, which takes a third of the CPU."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tidemark.app.pipeline import class_archive
from tidemark.app.stack.home import Home
from tidemark.app.stack.processes import KafkaServer, free_port


class ArchivedKafka(KafkaServer):
    """A broker whose JVM gets more options."""

    def __init__(self, home: Home, port: int, *, java: str, jars: Path, options: Sequence[str]) -> None:
        super().__init__(home, port, java=java, jars=jars)
        self._options = options

    def _jvm(self) -> list[str]:
        java, *rest = super()._jvm()
        return [java, *self._options, *rest]


def broker_options(java: str, jars: Path, directory: Path) -> list[str]:
    """The archive is made by the first who asks."""

    def write(own: Path, option: str) -> None:
        home, port = Home(own), free_port()
        KafkaServer(home, port, java=java, jars=jars).prepare()  # a JVM of its own, with other classes
        broker = ArchivedKafka(home, port, java=java, jars=jars, options=[*class_archive.NO_WARNINGS, option])
        broker.start()
        broker.stop(180)

    archive = class_archive.archive_path("broker", java, sorted(jars.iterdir()), directory)
    with suppress(FileNotFoundError):  # on a very busy machine the broker was killed before it had written
        class_archive.create(archive, write)
    return class_archive.options(archive)
