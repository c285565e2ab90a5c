import asyncio
import json

import asyncpg


async def place(connection: asyncpg.Connection, total: int) -> None:
    await connection.execute(
        """
        WITH fact AS (SELECT tidemark.append('orders', $1::jsonb) AS id)
        INSERT INTO orders (stream_id, total) SELECT id, $2 FROM fact
        """,
        json.dumps({"total": total}),
        total,
    )


async def main() -> None:
    connection = await asyncpg.connect()

    async with connection.transaction():
        await place(connection, 40)

    unwanted = connection.transaction()
    await unwanted.start()
    await place(connection, 41)
    await unwanted.rollback()  # it did not happen, and its ID is void

    async with connection.transaction():
        await place(connection, 42)

    await connection.close()


asyncio.run(main())
