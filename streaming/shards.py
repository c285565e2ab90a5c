"""Which shard holds a stream. The answer is stored in checkpoints and in Postgres: it must never change."""

from zlib import crc32


def shard_of(stream: str, shards: int) -> int:
    return crc32(stream.encode()) % shards
