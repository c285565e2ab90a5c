import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import psycopg

PLACE = "SELECT linear FROM tidemark_reader.places WHERE stream = 'orders' AND reader = 'billing'"
PATIENCE = 5.0


class Shop(BaseHTTPRequestHandler):
    def do_POST(self) -> None:  # /orders: the service that writes
        with psycopg.connect() as connection:
            order = "INSERT INTO orders SELECT tidemark.append('orders', '{\"total\": 40}'), 40 RETURNING stream_id"
            (stream_id,) = connection.execute(order).fetchone() or (0,)
        self.answer(201, {"token": f"m{stream_id}"})  # after the commit

    def do_GET(self) -> None:  # /invoices?token=m41: the service that reads
        (token,) = parse_qs(urlsplit(self.path).query).get("token", ["m0"])
        until = time.monotonic() + PATIENCE
        with psycopg.connect(autocommit=True) as connection:
            while (connection.execute(PLACE).fetchone() or (0,))[0] < int(token.removeprefix("m")):
                if time.monotonic() > until:
                    return self.answer(503, {"error": f"invoices are not yet at {token}"})
                time.sleep(0.02)
            invoices = connection.execute("SELECT stream_id, total FROM invoices ORDER BY number").fetchall()
        return self.answer(200, invoices)

    def answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Shop).serve_forever()
