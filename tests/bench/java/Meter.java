import com.alibaba.fastjson2.JSON;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.LongAdder;

/** Counts records over all threads; the main thread notes how many there were at which time, until it was all of them. */
final class Meter {
    public record Mark(long records, double at) {}

    private static final long EVERY_MS = 20;
    private static final long PATIENCE_MS = 60_000;

    private final LongAdder seen = new LongAdder();
    private final List<Mark> marks = new ArrayList<>();
    private volatile boolean done;

    Meter() {
        Thread.setDefaultUncaughtExceptionHandler((thread, problem) -> fail(problem));
    }

    static void fail(Throwable problem) {
        problem.printStackTrace();
        Runtime.getRuntime().halt(1);
    }

    void add(long records) {
        seen.add(records);
    }

    boolean done() {
        return done;
    }

    void await(long records) throws InterruptedException {
        long last = 0;
        long moved = System.currentTimeMillis();
        while (last < records) {
            Thread.sleep(EVERY_MS);
            long now = System.currentTimeMillis();
            long sum = seen.sum();
            if (sum > last) {
                last = sum;
                moved = now;
                marks.add(new Mark(sum, now / 1000.0));
            } else if (now - moved > PATIENCE_MS) {
                throw new IllegalStateException("nothing came for a minute after " + sum + " of " + records + " records");
            }
        }
        done = true;
    }

    /** Print what was found, and stay until standard input ends: the CPU of a process can be read while it is there. */
    void answer(Map<String, Map<String, Long>> positions) throws IOException {
        System.out.println("{\"marks\":" + JSON.toJSONString(marks) + ",\"positions\":" + JSON.toJSONString(positions) + "}");
        System.in.read();
    }
}
