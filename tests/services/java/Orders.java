import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;

public class Orders {
    static final String PLACE = """
            WITH fact AS (SELECT tidemark.append('orders', ?::jsonb) AS id)
            INSERT INTO orders (stream_id, total) SELECT id, ? FROM fact
            """;

    static void place(Connection connection, int total) throws SQLException {
        try (var statement = connection.prepareStatement(PLACE)) {
            statement.setString(1, "{\"total\": " + total + "}");
            statement.setInt(2, total);
            statement.executeUpdate();
        }
    }

    public static void main(String[] arguments) throws SQLException {
        var at = System.getenv();
        var url = "jdbc:postgresql://" + at.get("PGHOST") + ":" + at.get("PGPORT") + "/" + at.get("PGDATABASE");
        try (var connection = DriverManager.getConnection(url, at.get("PGUSER"), at.get("PGPASSWORD"))) {
            connection.setAutoCommit(false);

            place(connection, 40);
            connection.commit();

            place(connection, 41);
            connection.rollback(); // it did not happen, and its ID is void

            place(connection, 42);
            connection.commit();
        }
    }
}
