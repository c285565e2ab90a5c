import java.nio.file.Path;
import java.time.Duration;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlyKeyValueStore;
import org.apache.kafka.streams.state.StoreBuilder;
import org.apache.kafka.streams.state.Stores;

/** Kafka Streams: a processor with a store of trackers by writer, `rocksdb` or `heap`, without a changelog topic. */
final class OnKafkaStreams {
    private static final String STORE = "writers";
    /** Stands in no name: names have no white space. */
    private static final char BETWEEN = '\t';

    private OnKafkaStreams() {}

    public static void main(String[] arguments) throws Exception {
        boolean rocksdb = arguments[0].equals("rocksdb");
        Task task = Task.of(arguments);
        Meter meter = new Meter();
        try (KafkaStreams streams = new KafkaStreams(topology(task, store(rocksdb), meter), config(task))) {
            streams.setUncaughtExceptionHandler(problem -> {
                Meter.fail(problem);
                return null;
            });
            streams.start();
            meter.await(task.records);
            meter.answer(positions(streams));
            streams.close(Duration.ofSeconds(10));
        }
    }

    private static StoreBuilder<KeyValueStore<String, Tracker>> store(boolean rocksdb) {
        StoreBuilder<KeyValueStore<String, Tracker>> builder = Stores.keyValueStoreBuilder(
                rocksdb ? Stores.persistentKeyValueStore(STORE) : Stores.inMemoryKeyValueStore(STORE),
                Serdes.String(),
                Tracker.serde());
        // What is changed again and again reaches RocksDB once a commit; before a store in the heap it would be one more.
        return (rocksdb ? builder.withCachingEnabled() : builder.withCachingDisabled()).withLoggingDisabled();
    }

    private static Topology topology(Task task, StoreBuilder<?> store, Meter meter) {
        StreamsBuilder builder = new StreamsBuilder();
        builder.addStateStore(store)
                .stream(task.topic, Consumed.with(Serdes.ByteArray(), Serdes.ByteArray()))
                .process(() -> new Following(meter), STORE);
        return builder.build();
    }

    private static final class Following implements Processor<byte[], byte[], Void, Void> {
        private final Meter meter;
        private KeyValueStore<String, Tracker> writers;

        Following(Meter meter) {
            this.meter = meter;
        }

        @Override
        public void init(ProcessorContext<Void, Void> context) {
            writers = context.getStateStore(STORE);
        }

        @Override
        public void process(Record<byte[], byte[]> record) {
            Fact fact = Fact.read(record.value());
            if (fact != null) {
                String key = fact.stream + BETWEEN + fact.writer;
                Tracker tracker = writers.get(key);
                if (tracker == null) {
                    tracker = new Tracker();
                }
                tracker.add(fact);
                writers.put(key, tracker);
            }
            meter.add(1);
        }
    }

    private static Properties config(Task task) {
        Path directory = Path.of(task.directory);
        Properties config = new Properties();
        config.put(StreamsConfig.APPLICATION_ID_CONFIG, directory.getFileName().toString());
        config.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, task.bootstrap);
        config.put(StreamsConfig.STATE_DIR_CONFIG, task.directory);
        config.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, task.threads);
        config.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 64L << 20);
        config.put(StreamsConfig.BUFFERED_RECORDS_PER_PARTITION_CONFIG, 10_000);
        config.put(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest");
        config.put(ConsumerConfig.MAX_POLL_RECORDS_CONFIG, 10_000);
        config.put(ConsumerConfig.CHECK_CRCS_CONFIG, false);
        return config;
    }

    private static Map<String, Map<String, Long>> positions(KafkaStreams streams) {
        ReadOnlyKeyValueStore<String, Tracker> writers =
                streams.store(StoreQueryParameters.fromNameAndType(STORE, QueryableStoreTypes.keyValueStore()));
        Map<String, Map<String, Long>> found = new TreeMap<>();
        try (KeyValueIterator<String, Tracker> all = writers.all()) {
            all.forEachRemaining(each -> {
                int between = each.key.indexOf(BETWEEN);
                found.computeIfAbsent(each.key.substring(0, between), name -> new TreeMap<>())
                        .put(each.key.substring(between + 1), each.value.position());
            });
        }
        return found;
    }
}
