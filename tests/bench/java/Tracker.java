import java.nio.ByteBuffer;
import java.util.Arrays;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.Serializer;

/**
 * One writer: the position up to which all of its IDs have completed, and what completed beyond it, as disjoint intervals
 * (from, to] in ascending order. For one thread.
 */
final class Tracker {
    private static final int LEAST = 4;
    private static final int HEAD = 2 * Long.BYTES;

    private long epoch;
    private long position;
    private int early;
    private long[] from;
    private long[] to;

    Tracker() {
        this(0, 0, 0);
    }

    private Tracker(long epoch, long position, int early) {
        this.epoch = epoch;
        this.position = position;
        this.early = early;
        from = new long[Math.max(LEAST, early + 1)];
        to = new long[Math.max(LEAST, early + 1)];
    }

    long position() {
        return position;
    }

    /** Duplicates and what an earlier epoch left behind change nothing. */
    void add(Fact fact) {
        if (fact.epoch < epoch) {
            return;
        }
        switch (fact.kind) {
            case JOIN -> {
                epoch = fact.epoch;
                complete(position, fact.to());
            }
            case RETIRE -> complete(position, fact.to());
            default -> complete(fact.from(), fact.to());
        }
    }

    private void complete(long begin, long end) {
        if (end <= position) {
            return;
        }
        if (begin > position) {
            hold(begin, end);
            return;
        }
        position = end;
        int passed = 0;
        while (passed < early && from[passed] <= position) {
            position = Math.max(position, to[passed++]);
        }
        if (passed > 0) {
            replace(0, passed, 0);
        }
    }

    private void hold(long begin, long end) {
        int first = early;
        while (first > 0 && to[first - 1] >= begin) {
            first--;
        }
        int last = first;
        while (last < early && from[last] <= end) {
            last++;
        }
        long low = first < last ? Math.min(begin, from[first]) : begin;
        long high = first < last ? Math.max(end, to[last - 1]) : end;
        replace(first, last, 1);
        from[first] = low;
        to[first] = high;
    }

    /** Make room for `count` intervals where those from `first` to before `last` were. */
    private void replace(int first, int last, int count) {
        int size = early - (last - first) + count;
        if (size > from.length) {
            from = Arrays.copyOf(from, 2 * size);
            to = Arrays.copyOf(to, 2 * size);
        }
        System.arraycopy(from, last, from, first + count, early - last);
        System.arraycopy(to, last, to, first + count, early - last);
        early = size;
    }

    static Serde<Tracker> serde() {
        Serializer<Tracker> pack = (topic, tracker) -> tracker == null ? null : tracker.packed();
        Deserializer<Tracker> unpack = (topic, bytes) -> bytes == null ? null : unpacked(bytes);
        return Serdes.serdeFrom(pack, unpack);
    }

    private byte[] packed() {
        ByteBuffer buffer = ByteBuffer.allocate(HEAD + early * 2 * Long.BYTES).putLong(epoch).putLong(position);
        for (int index = 0; index < early; index++) {
            buffer.putLong(from[index]).putLong(to[index]);
        }
        return buffer.array();
    }

    private static Tracker unpacked(byte[] bytes) {
        ByteBuffer buffer = ByteBuffer.wrap(bytes);
        Tracker tracker = new Tracker(buffer.getLong(), buffer.getLong(), (bytes.length - HEAD) / (2 * Long.BYTES));
        for (int index = 0; index < tracker.early; index++) {
            tracker.from[index] = buffer.getLong();
            tracker.to[index] = buffer.getLong();
        }
        return tracker;
    }
}
