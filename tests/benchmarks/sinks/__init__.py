"""How fast the sinks are, beside their bare clients and against real servers: `make bench-sinks`."""
