WITH taken AS MATERIALIZED (
    SELECT low, high, late FROM tidemark_reader.take('orders', 'billing')
)
INSERT INTO invoices (stream_id, total)
SELECT stream_id, total FROM orders, taken
WHERE stream_id > low AND stream_id <= high OR stream_id = ANY (late)
ORDER BY stream_id
\watch 0.2
