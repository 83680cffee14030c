"""Messages from NATS JetStream: a durable pull consumer, acknowledged one by one."""
