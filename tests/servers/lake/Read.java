import org.apache.spark.sql.SparkSession;

/** Prints the rows of tables, one JSON object on each line, with a line before each table: format, then its place. */
public class Read {
    public static void main(String[] tables) {
        SparkSession spark = SparkSession.builder()
            .master("local[1]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "1")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
            .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
            // Tables by their place; the one that Iceberg makes up by itself would ask for Hive.
            .config("spark.sql.catalog.default_iceberg", "org.apache.iceberg.spark.SparkCatalog")
            .config("spark.sql.catalog.default_iceberg.type", "hadoop")
            .config("spark.sql.catalog.default_iceberg.warehouse", System.getProperty("java.io.tmpdir"))
            .getOrCreate();
        for (int at = 0; at < tables.length; at += 2) {
            System.out.println("# " + tables[at]);
            for (String row : spark.read().format(tables[at]).load(tables[at + 1]).toJSON().collectAsList()) {
                System.out.println(row);
            }
        }
        spark.stop();
    }
}
