"""Servers that are lost: positions stand, and go on by themselves when the server is there again."""

import time

import redis

from tests.fix_servers import away
from tests.incidents.scene import Scene
from tests.incidents.test_blocked import fact
from tidemark.app.stack.postgres import PostgresServer
from tidemark.app.stack.processes import KafkaServer, RedisServer
from tidemark.streaming.wire.records import Join


def test_a_lost_redis(scene: Scene, redis_server: RedisServer) -> None:
    """It is away, and comes back empty."""
    site = scene.site
    with scene.incident(
        "lost-redis", "TidemarkPipelineServerDown", "TidemarkNoBatches", "TidemarkSidecarServerDown"
    ) as incident:
        site.send(Join(stream="cart", writer="w", epoch=1, id=0), fact("cart", "w", 1))
        site.reaches("cart", linear=1)
        with redis.Redis.from_url(site.redis_url) as client:
            client.flushall()
            client.save()
        with away(redis_server):
            site.send(fact("cart", "w", 2))
            time.sleep(2)
            site.send(fact("cart", "w", 3))
            incident.wait_for_alert("TidemarkPipelineServerDown")
            incident.wait_for_alert("TidemarkNoBatches")
            incident.wait_for_alert("TidemarkSidecarServerDown")
            said = incident.tidemark("status", "cart")
            assert "Redis" in said
        site.reaches("cart", linear=3)
        incident.calm()
        assert "0 differences" in incident.tidemark(
            "verify", "--history", "--sidecar", str(scene.client.base_url).rstrip("/")
        )


def test_a_lost_postgres(scene: Scene, postgres: PostgresServer) -> None:
    """Nothing moves: what is not durable is not published."""
    site = scene.site
    alerts = "TidemarkPipelineServerDown", "TidemarkNoBatches", "TidemarkSidecarServerDown"
    with scene.incident("lost-postgres", *alerts) as incident:
        site.send(Join(stream="stock", writer="w", epoch=1, id=0), fact("stock", "w", 1))
        site.reaches("stock", linear=1)
        with away(postgres):
            site.send(fact("stock", "w", 2))
            incident.wait_for_alert("TidemarkPipelineServerDown")
            incident.wait_for_alert("TidemarkNoBatches")
            incident.wait_for_alert("TidemarkSidecarServerDown")
            said = incident.tidemark("status", code=1)
            assert "Postgres" in said
        site.reaches("stock", linear=2)
        incident.calm()
        incident.tidemark("status", "stock")
        assert "0 differences" in incident.tidemark("verify", "--history")


def test_a_lost_kafka(scene: Scene, kafka: KafkaServer) -> None:
    """Facts wait with their services."""
    site = scene.site
    with scene.incident("lost-kafka", "TidemarkPipelineServerDown") as incident:
        site.reaches("returns", linear=scene.append("returns"))
        with away(kafka):
            last = scene.append("returns")
            incident.wait_for_alert()
            said = incident.tidemark("status", "returns")
            assert "Kafka" in said
        site.reaches("returns", linear=last)
        incident.calm()
        incident.tidemark("status", "returns")
