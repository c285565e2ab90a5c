import psycopg

TAKE = "SELECT low, high, late FROM tidemark_reader.take('orders', 'billing')"
READ = """
    SELECT stream_id, total FROM orders
    WHERE stream_id > %s AND stream_id <= %s OR stream_id = ANY (%s) ORDER BY stream_id
"""


def bill(connection: psycopg.Connection) -> bool:
    taken = connection.execute(TAKE).fetchone()
    if taken is None:
        return False  # nothing is new
    for order in connection.execute(READ, taken).fetchall():
        connection.execute("INSERT INTO invoices (stream_id, total) VALUES (%s, %s)", order)
    return True


with psycopg.connect(autocommit=True) as connection:
    connection.execute("LISTEN tidemark_orders")
    while True:
        with connection.transaction():
            more = bill(connection)
        if not more:
            list(connection.notifies(timeout=10, stop_after=1))
