"""A consumer loop written by hand: confluent-kafka, a JSON decoder, a dict of edges that came early."""

import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from tests.bench.competitors.gaps import GapBuffer
from tests.bench.competitors.task import Task
from tests.bench.rate import Meter


def run(task: Task, meter: Meter, decode: Callable[[bytes], Any]) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": task.bootstrap,
            "group.id": "loop",
            "enable.auto.commit": False,
            # The reader's thread never waits for the network: more than enough is fetched ahead.
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 1 << 20,
            "check.crcs": False,
        }
    )
    consumer.assign([TopicPartition(task.topic, number, 0) for number in range(task.partitions)])
    gaps, seen = GapBuffer(), 0
    add = gaps.add
    while not meter.done:
        messages = consumer.consume(10_000, timeout=1.0)
        for message in messages:
            add(decode(message.value()))
        seen += len(messages)
        meter.note(seen, time.time())
    consumer.close()
