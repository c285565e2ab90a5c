package main

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const take = `WITH taken AS MATERIALIZED (SELECT low, high, late FROM tidemark_reader.take('orders', 'billing'))
	SELECT stream_id, total FROM orders, taken WHERE stream_id > low AND stream_id <= high OR stream_id = ANY (late) ORDER BY stream_id`

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	ctx := context.Background()
	conn := must(pgx.Connect(ctx, ""))
	for ; ; time.Sleep(100 * time.Millisecond) {
		tx := must(conn.Begin(ctx))
		for _, o := range must(pgx.CollectRows(must(tx.Query(ctx, take)), pgx.RowToMap)) {
			err := pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
				_, err := savepoint.Exec(ctx, "INSERT INTO invoices (stream_id, total) VALUES ($1, $2)", o["stream_id"], o["total"])
				return err
			})
			if failed := new(pgconn.PgError); errors.As(err, &failed) && failed.Code[:2] == "23" { // violates a constraint
				_, err = tx.Exec(ctx, "SELECT tidemark_reader.park('orders', 'billing', $1, $2)", o["stream_id"], failed.Message)
			}
			must(0, err) // other errors end the program
		}
		must(0, tx.Commit(ctx))
	}
}
