import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.util.Random;

/**
 * The payment service of the demo, an example of a service that is not in Python. It appends payments with tidemark.append on several connections.
 * Some transactions take long, some are rolled back. The session `slow-payment` keeps each transaction open for 15 to 20 s, and pauses for
 * 10 to 15 s, so that `tidemark status` has an open transaction to show. Janino compiles this file, so a JRE is enough. Janino has neither lambdas nor try-with-resources.
 */
public class Payments extends Thread {
    private static final String SLOW = "slow-payment";

    private final Random random = new Random();
    private final String session;

    /** `session`: the application name of the connection. */
    private Payments(String session) {
        this.session = session;
    }

    public static void main(String[] arguments) {
        for (int each = 0; each < 3; each++) {
            new Payments("payment").start();
        }
        new Payments(SLOW).start();
    }

    public void run() {
        while (true) {
            try {
                Connection connection = connected(session);
                try {
                    take(connection);
                } finally {
                    connection.close();
                }
            } catch (SQLException problem) {
                System.err.println(problem.getMessage());
                pause(1000);
            }
        }
    }

    private static Connection connected(String session) throws SQLException {
        String url = "jdbc:postgresql://" + at("PGHOST") + ":" + at("PGPORT") + "/" + at("PGDATABASE") + "?ApplicationName=" + session;
        Connection connection = DriverManager.getConnection(url, at("PGUSER"), at("PGPASSWORD"));
        connection.setAutoCommit(false);
        return connection;
    }

    /** Appends payments without end, one in each transaction. */
    private void take(Connection connection) throws SQLException {
        PreparedStatement append = connection.prepareStatement("SELECT tidemark.append('payments', ?::jsonb)");
        while (true) {
            append.setString(1, "{\"amount\": " + (1 + random.nextInt(100)) + "}");
            append.execute();
            if (session.equals(SLOW)) {
                pause(15000 + random.nextInt(5000));
                connection.commit();
                pause(10000 + random.nextInt(5000));
                continue;
            }
            pause(random.nextInt(20) == 0 ? 1000 + random.nextInt(4000) : random.nextInt(500));
            if (random.nextInt(10) == 0) {
                connection.rollback(); // the card was refused: the ID is void
            } else {
                connection.commit();
            }
            pause(random.nextInt(500));
        }
    }

    private static String at(String name) {
        return System.getenv(name);
    }

    private static void pause(int milliseconds) {
        try {
            Thread.sleep(milliseconds);
        } catch (InterruptedException over) {
            throw new IllegalStateException(over);
        }
    }
}
