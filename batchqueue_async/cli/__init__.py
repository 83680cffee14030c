"""The command line. `main` finds the commands in `COMMANDS`, one module each."""

from __future__ import annotations
