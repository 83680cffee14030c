"""Which writes of a batch are in: their keys, their places in the batch, and the notes of what was delivered."""

from __future__ import annotations
