package main

import (
	"context"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
)

const read = "SELECT * FROM orders WHERE stream_id > $1 AND stream_id <= $2 OR stream_id = ANY ($3) ORDER BY stream_id"

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	ctx := context.Background()
	conn := must(pgx.Connect(ctx, ""))
	must(conn.Exec(ctx, "LISTEN tidemark_orders"))
	for {
		tx := must(conn.Begin(ctx))
		ranges := must(pgx.CollectRows(must(tx.Query(ctx, "SELECT * FROM tidemark_reader.take('orders', 'billing')")), pgx.RowToMap))
		for _, r := range ranges {
			orders := must(tx.Query(ctx, read, r["low"], r["high"], r["late"]))
			for _, o := range must(pgx.CollectRows(orders, pgx.RowToMap)) {
				must(tx.Exec(ctx, "INSERT INTO invoices (stream_id, total) VALUES ($1, $2)", o["stream_id"], o["total"]))
			}
		}
		must(0, tx.Commit(ctx))
		if len(ranges) == 0 { // nothing is new
			wait, cancel := context.WithTimeout(ctx, 10*time.Second)
			conn.WaitForNotification(wait)
			cancel()
		}
	}
}
