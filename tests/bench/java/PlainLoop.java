import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** A consumer a thread, each with partitions of its own, and a map of trackers: a stream lies in one partition. */
final class PlainLoop implements Runnable {
    private final Task task;
    private final int number;
    private final Meter meter;
    private final Map<String, Map<String, Tracker>> streams = new HashMap<>();

    private PlainLoop(Task task, int number, Meter meter) {
        this.task = task;
        this.number = number;
        this.meter = meter;
    }

    public static void main(String[] arguments) throws Exception {
        Task task = Task.of(arguments);
        Meter meter = new Meter();
        Map<PlainLoop, Thread> threads = new HashMap<>();
        for (int number = 0; number < task.threads; number++) {
            PlainLoop loop = new PlainLoop(task, number, meter);
            Thread thread = new Thread(loop, "loop-" + number);
            threads.put(loop, thread);
            thread.start();
        }
        meter.await(task.records);
        Map<String, Map<String, Long>> positions = new TreeMap<>();
        for (Map.Entry<PlainLoop, Thread> each : threads.entrySet()) {
            each.getValue().join();
            each.getKey().streams.forEach((stream, writers) -> {
                Map<String, Long> found = positions.computeIfAbsent(stream, name -> new TreeMap<>());
                writers.forEach((writer, tracker) -> found.put(writer, tracker.position()));
            });
        }
        meter.answer(positions);
    }

    @Override
    public void run() {
        List<TopicPartition> mine = new ArrayList<>();
        for (int partition = number; partition < task.partitions; partition += task.threads) {
            mine.add(new TopicPartition(task.topic, partition));
        }
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(config(), bytes, bytes)) {
            consumer.assign(mine);
            consumer.seekToBeginning(mine);
            while (!meter.done()) {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(100));
                for (ConsumerRecord<byte[], byte[]> record : records) {
                    follow(Fact.read(record.value()));
                }
                meter.add(records.count());
            }
        }
    }

    private void follow(Fact fact) {
        if (fact != null) {
            streams.computeIfAbsent(fact.stream, name -> new HashMap<>())
                    .computeIfAbsent(fact.writer, name -> new Tracker())
                    .add(fact);
        }
    }

    private Properties config() {
        Properties config = new Properties();
        config.put(ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, task.bootstrap);
        config.put(ConsumerConfig.ENABLE_AUTO_COMMIT_CONFIG, false);
        config.put(ConsumerConfig.MAX_POLL_RECORDS_CONFIG, 10_000);
        config.put(ConsumerConfig.CHECK_CRCS_CONFIG, false);
        return config;
    }
}
