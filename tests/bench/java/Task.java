import com.alibaba.fastjson2.JSON;

/** What a competitor is told: the fields of `Task` in tests/bench/competitors/task.py that matter here. */
public final class Task {
    public String bootstrap;
    public String topic;
    public int partitions;
    public long records;
    public String directory;

    int threads;

    /** The last two arguments: how many threads, and the task as JSON. */
    static Task of(String[] arguments) {
        Task task = JSON.parseObject(arguments[arguments.length - 1], Task.class);
        task.threads = Integer.parseInt(arguments[arguments.length - 2]);
        return task;
    }
}
