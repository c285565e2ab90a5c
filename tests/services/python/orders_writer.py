import psycopg

from tidemark import Writer
from tidemark.errors import exit_on_error

writer = Writer()


def place(connection: psycopg.Connection, total: int) -> None:
    stream_id = writer.append(connection, "orders", {"total": total})
    connection.execute("INSERT INTO orders (stream_id, total) VALUES (%s, %s)", [stream_id, total])


with exit_on_error(), psycopg.connect() as connection:
    with connection.transaction():
        place(connection, 40)

    with connection.transaction(force_rollback=True):
        place(connection, 41)  # it did not happen, and its ID is void

    with connection.transaction():
        place(connection, 42)
