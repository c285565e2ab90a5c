"""What went back, or is gone, or is given twice: a checkpoint, a database, the pipeline itself."""

import shutil

import psycopg
from psycopg import sql

from tests.app.running import PATIENCE
from tests.incidents.scene import PIPELINE, SECOND, Scene
from tests.incidents.test_blocked import fact
from tests.waiting import eventually
from tidemark.streaming.wire.records import Join


def test_a_lost_checkpoint(scene: Scene) -> None:
    """The disk that held it is lost, and the pipeline with it; it is started again, with an empty one."""
    site = scene.site
    with scene.incident("lost-checkpoint", "TidemarkPipelineNotReady") as incident:
        site.send(Join(stream="admissions", writer="w", epoch=1, id=0), fact("admissions", "w", 1))
        site.reaches("admissions", linear=1)
        scene.pipeline.kill()
        eventually(scene.pipeline.alone, PATIENCE, lambda: "the end of its JVM")
        shutil.rmtree(site.checkpoint)
        site.send(*(fact("admissions", "w", id) for id in (2, 3, 4)))
        incident.wait_for_alert()
        assert "pipeline: not running" in incident.tidemark("status", "admissions")
        scene.restart()
        incident.shown("tidemark pipeline", scene.pipeline.says("The query runs"))
        site.reaches("admissions", linear=4)
        incident.calm()
        incident.tidemark("status", "admissions")
        assert "0 differences" in incident.tidemark("verify", "--history")


def test_two_pipelines(scene: Scene) -> None:
    """The first loses its way to Postgres, and a second takes over: the first cannot know."""
    site = scene.site
    with scene.incident(
        "two-pipelines", "TidemarkTwoLeaseOwners", "TidemarkPipelineServerDown", "TidemarkNoBatches"
    ) as incident:
        site.send(Join(stream="seats", writer="w", epoch=1, id=0), fact("seats", "w", 1))
        site.reaches("seats", linear=1)
        second = site.start(
            module=("tests.incidents.hasty",),
            owner=SECOND,
            checkpoint=site.home / "second",
            metrics_port=scene.second_port,
        )
        second.says("Waiting for the lease")
        with scene.way.cut():
            second.says("Took the lease")
            site.send(fact("seats", "w", 2))
            site.reaches("seats", linear=2)
            incident.wait_for_alert("TidemarkTwoLeaseOwners")
            incident.wait_for_alert("TidemarkPipelineServerDown")
            incident.wait_for_alert("TidemarkNoBatches")
            said = incident.tidemark("status", "seats")
            assert f"active on {SECOND}" in said
        scene.pipeline.says("the lease was taken over")
        incident.calm()
        second.terminate()
        site.send(fact("seats", "w", 3))
        site.reaches("seats", linear=3)
        assert f"active on {PIPELINE}" in incident.tidemark("status", "seats")
        assert "0 differences" in incident.tidemark("verify", "--history")


def test_a_restored_database_of_writers(scene: Scene) -> None:
    """The services' database is set back by a restore, and gives IDs out again that readers have seen."""
    site, shop = scene.site, scene.shop

    def administer(statement: str, *names: str) -> None:
        with psycopg.connect(shop.dsn("postgres"), autocommit=True) as connection:
            connection.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'shop'")
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    with scene.incident("restored-database", "TidemarkSourceRegressed", "TidemarkLateCompletions") as incident:
        site.reaches("returns", linear=scene.append("returns"))
        administer("create database {} template {}", "backup", "shop")
        lost = scene.append("returns")
        site.reaches("returns", linear=lost)
        administer("drop database {} with (force)", "shop")
        administer("alter database {} rename to {}", "backup", "shop")
        assert scene.append("returns") == lost
        incident.wait_for_alert("TidemarkSourceRegressed")
        incident.wait_for_alert("TidemarkLateCompletions")
        site.reaches("returns", linear=scene.append("returns"))
        said = incident.tidemark("late", "list")
        assert "regressed" in said
        incident.tidemark("gaps")
        incident.act("late", "resolve", "returns", said.splitlines()[1].split()[0], why="booked again by hand")
        incident.calm()
        assert "override " in incident.tidemark("late", "list", "--all")
