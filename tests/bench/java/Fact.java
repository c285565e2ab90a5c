import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONException;

/** A record of the facts topic, as docs/design.md 3 has it. The rows are opaque: a tracker of positions skips them. */
public final class Fact {
    public enum Kind { RDATA, VOID, POSITION, RUN, JOIN, RETIRE }

    private static final long ABSENT = Long.MIN_VALUE;

    public Kind kind;
    public String stream;
    public String writer;
    public long epoch;
    public long prev = ABSENT;
    public long id = ABSENT;
    public long[] ids;

    /** Null where the value moves no position: a row of a fact whose number comes later ("batch"), or no good record. */
    static Fact read(byte[] value) {
        Fact fact;
        try {
            fact = JSON.parseObject(value, Fact.class);
        } catch (JSONException | NumberFormatException unreadable) {
            return null;
        }
        boolean whole = fact != null && fact.kind != null && fact.stream != null && fact.writer != null;
        return whole && (fact.kind == Kind.RUN ? fact.ids != null && fact.ids.length > 0 : fact.id != ABSENT) ? fact : null;
    }

    /** A magnitude, as all of a tracker's IDs: streams that run backwards have negative ones. */
    long from() {
        if (prev != ABSENT) {
            return Math.abs(prev);
        }
        return Math.abs(kind == Kind.RUN ? ids[0] : id) - 1;
    }

    /** A run is a chain, so it completes everything up to its last ID. */
    long to() {
        return Math.abs(kind == Kind.RUN ? ids[ids.length - 1] : id);
    }
}
