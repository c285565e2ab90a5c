package main

import (
	"context"
	"errors"
	"log"

	"github.com/jackc/pgx/v5"
)

var errUnwanted = errors.New("unwanted")

func place(ctx context.Context, tx pgx.Tx, total int) error {
	_, err := tx.Exec(ctx, `
		WITH fact AS (SELECT tidemark.append('orders', $1::jsonb) AS id)
		INSERT INTO orders (stream_id, total) SELECT id, $2 FROM fact`,
		map[string]int{"total": total}, total)
	return err
}

func main() {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close(ctx)

	for _, total := range []int{40, 41, 42} {
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			if err := place(ctx, tx, total); err != nil {
				return err
			}
			if total == 41 {
				return errUnwanted // rolled back: it did not happen, and its ID is void
			}
			return nil
		})
		if err != nil && !errors.Is(err, errUnwanted) {
			log.Fatal(err)
		}
	}
}
