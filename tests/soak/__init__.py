"""Everything at once for minutes: real servers, faults at random from a seed, and a verdict; `make soak`."""
