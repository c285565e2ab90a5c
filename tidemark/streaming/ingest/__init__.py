"""From messages in Kafka to packets of runs: the part of a batch that runs in Spark's Python workers.

The path of a record:

1. `source` is the data source for Spark. The planner queries the end offsets (`ranges.EndOffsets`), limits the size of
   the batch, and divides it into tasks. A task is a list of offset ranges (`record_batch.PlannedRange`).
2. A worker reads the ranges of its task with `ranges.RangeReader`. The reader handles transactions, holes in the
   offsets and lost records, and consumes messages with a consumer from `consumer`.
3. The records of one partition arrive as columns (`record_batch`): all values in one array of bytes, all keys in
   another, offsets and times as arrays of numbers. In the fast form, no Python object exists for a record.
4. `decode.Decoder` turns records into edges `(prev, id]`, markers and rejected offsets. `record_batch` gives each
   (stream, writer, epoch) a number, so that edges can be rows of an array (`record_batch.Edges`).
5. When a task has read a range, `compact` cuts the edges at the JOIN, RETIRE and OPEN records of their stream. Then
   `compact` links the edges into chains (`compact.link`), and packs the chains into packets for each shard
   (`wire.runs.Packet`). A record of 140 bytes becomes about 5 bytes. The state function reads the packets
   (`core.batch`).

Each step that handles single records has two implementations with equal results:

    step                   fast form                          slow form
    consume a message      native_consumer (C, by ctypes)     consumer.PythonConsumer (confluent-kafka)
    copy its bytes         kernels.gather                     ctypes.string_at
    decode a record        field_scan.scan, with kernels      wire.records.read
    sort edges             kernels.sort_edges                 numpy

`wire.records.read` defines the meaning of records. `field_scan` accepts a record only if its meaning is certain, and
leaves all other records to `read`. So only `read` rejects a record for its content, and gives the reason.

The slow forms are used in four cases:

- The batch has few records. Loading numba takes 0.4 s of CPU, so a process with little traffic never loads numba. The
  limits are `Decoder.MIN_COMPILED_BYTES`, `compact.MAX_NUMPY_EDGES` and
  `native_consumer._MIN_COMPILED_MESSAGES`.
- A thread is still loading the compiled code, and the slow form takes less than `jit_loader.MAX_SLOW_SECONDS`.
- numba is missing or broken (`jit_loader`). A record then takes about 12 µs of CPU instead of 0.5 µs.
- confluent-kafka hides the symbols of librdkafka (`consumer`). A message then takes about 2 µs instead of 0.3 µs.

In the last two cases the worker logs a warning that begins with "Slow decoding". The pipeline repeats the warning in
its own log.

`jit_cache` caches the compiled code (`field_scan`, `kernels`) in files, because compiling takes seconds. A container
image contains these files: `python -m tidemark.app.pipeline.compile_ahead` writes them. Compiled functions allocate no
memory: callers pass arrays with enough room, and the functions return how many items they have written.
"""
