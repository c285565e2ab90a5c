import pg from "pg";

const client = new pg.Client();

async function place(total) {
  await client.query(
    `WITH fact AS (SELECT tidemark.append('orders', $1::jsonb) AS id)
     INSERT INTO orders (stream_id, total) SELECT id, $2 FROM fact`,
    [{ total }, total],
  );
}

await client.connect();

await client.query("BEGIN");
await place(40);
await client.query("COMMIT");

await client.query("BEGIN");
await place(41);
await client.query("ROLLBACK"); // it did not happen, and its ID is void

await client.query("BEGIN");
await place(42);
await client.query("COMMIT");

await client.end();
