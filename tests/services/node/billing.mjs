import pg from "pg";

const client = new pg.Client();
let moved = false;
let wake = () => {};

async function bill() {
  const { rows: [range] } = await client.query("SELECT low, high, late FROM tidemark_reader.take('orders', 'billing')");
  if (!range) return false; // nothing is new
  const orders = await client.query(
    `SELECT stream_id, total FROM orders
     WHERE stream_id > $1 AND stream_id <= $2 OR stream_id = ANY ($3) ORDER BY stream_id`,
    [range.low, range.high, range.late],
  );
  for (const { stream_id, total } of orders.rows) {
    await client.query("INSERT INTO invoices (stream_id, total) VALUES ($1, $2)", [stream_id, total]);
  }
  return true;
}

await client.connect();
client.on("notification", () => {
  moved = true;
  wake();
});
await client.query("LISTEN tidemark_orders");
while (true) {
  moved = false;
  await client.query("BEGIN");
  const more = await bill();
  await client.query("COMMIT");
  if (!more && !moved) {
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, 10_000);
    });
  }
}
