"""The Spark parts beside bare Spark."""
