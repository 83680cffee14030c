"""Messages from a Redis stream: a consumer group, its pending entries included."""
