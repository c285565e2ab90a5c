import java.sql.*;
import org.postgresql.PGConnection;

public class Billing {
    static final String TAKE = "SELECT low, high, late FROM tidemark_reader.take('orders', 'billing')";
    static final String READ = "SELECT * FROM orders WHERE stream_id > ? AND stream_id <= ? OR stream_id = ANY (?) ORDER BY stream_id";

    static boolean bill(Connection connection) throws SQLException {
        try (var take = connection.prepareStatement(TAKE);
                var read = connection.prepareStatement(READ);
                var write = connection.prepareStatement("INSERT INTO invoices (stream_id, total) VALUES (?, ?)")) {
            var range = take.executeQuery();
            if (!range.next()) return false; // nothing is new
            read.setLong(1, range.getLong("low"));
            read.setLong(2, range.getLong("high"));
            read.setArray(3, range.getArray("late"));
            for (var order = read.executeQuery(); order.next(); ) {
                write.setLong(1, order.getLong("stream_id"));
                write.setInt(2, order.getInt("total"));
                write.executeUpdate();
            }
            return true;
        }
    }

    public static void main(String[] arguments) throws SQLException {
        var at = System.getenv();
        var url = "jdbc:postgresql://" + at.get("PGHOST") + ":" + at.get("PGPORT") + "/" + at.get("PGDATABASE");
        try (var connection = DriverManager.getConnection(url, at.get("PGUSER"), at.get("PGPASSWORD"))) {
            connection.createStatement().execute("LISTEN tidemark_orders");
            connection.setAutoCommit(false);
            while (true) {
                var more = bill(connection);
                connection.commit();
                if (!more) connection.unwrap(PGConnection.class).getNotifications(10_000);
            }
        }
    }
}
