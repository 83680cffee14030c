"""RabbitMQ's lane: deliveries taken off the byte stream, acknowledged by ranges."""
