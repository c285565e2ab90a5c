"""Servers that are lost: positions stand, and go on by themselves when the server is there again."""

import time

import redis

from tests.fix_servers import away
from tests.incidents.scene import Scene
from tests.incidents.test_held import fact
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, RedisServer
from tidemark.streaming.wire.records import Join


def test_a_lost_redis(scene: Scene, redis_server: RedisServer) -> None:
    """It is away, and comes back empty."""
    site = scene.site
    with scene.story(
        "lost-redis", "TidemarkPipelineServerDown", "TidemarkNoBatches", "TidemarkSidecarServerDown"
    ) as story:
        site.send(Join(stream="cart", writer="w", epoch=1, id=0), fact("cart", "w", 1))
        site.reaches("cart", linear=1)
        with redis.Redis.from_url(site.redis_url) as client:
            client.flushall()
            client.save()
        with away(redis_server):
            site.send(fact("cart", "w", 2))
            time.sleep(2)
            site.send(fact("cart", "w", 3))
            story.woken("TidemarkPipelineServerDown")
            story.woken("TidemarkNoBatches")
            story.woken("TidemarkSidecarServerDown")
            said = story.tidemark("status", "cart")
            assert "Redis" in said
        site.reaches("cart", linear=3)
        story.calm()
        assert "0 differences" in story.tidemark(
            "verify", "--history", "--sidecar", str(scene.client.base_url).rstrip("/")
        )


def test_a_lost_postgres(scene: Scene, postgres: PostgresServer) -> None:
    """Nothing moves: what is not durable is not published."""
    site = scene.site
    alerts = "TidemarkPipelineServerDown", "TidemarkNoBatches", "TidemarkSidecarServerDown"
    with scene.story("lost-postgres", *alerts) as story:
        site.send(Join(stream="stock", writer="w", epoch=1, id=0), fact("stock", "w", 1))
        site.reaches("stock", linear=1)
        with away(postgres):
            site.send(fact("stock", "w", 2))
            story.woken("TidemarkPipelineServerDown")
            story.woken("TidemarkNoBatches")
            story.woken("TidemarkSidecarServerDown")
            said = story.tidemark("status", code=1)
            assert "Postgres" in said
        site.reaches("stock", linear=2)
        story.calm()
        story.tidemark("status", "stock")
        assert "0 differences" in story.tidemark("verify", "--history")


def test_a_lost_kafka(scene: Scene, kafka: KafkaServer) -> None:
    """Facts wait with their services."""
    site = scene.site
    with scene.story("lost-kafka", "TidemarkPipelineServerDown") as story:
        site.reaches("returns", linear=scene.append("returns"))
        with away(kafka):
            last = scene.append("returns")
            story.woken()
            said = story.tidemark("status", "returns")
            assert "Kafka" in said
        site.reaches("returns", linear=last)
        story.calm()
        story.tidemark("status", "returns")
