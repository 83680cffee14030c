"""How fast the exporter is: `make bench-export`."""
