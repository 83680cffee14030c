"""A service as its file says it, read and checked: plain values, and where each of them stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from batchqueue_async.service.file.shapes import Located

SECTIONS = ("sources", "queues", "exporters", "sinks", "pipelines")
"""Those whose things have names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """What runs.

    Attributes:
        name: what logs call it.
        file: where it was read.
        service: the values of the section of that name.
        observe: likewise.
        logs: likewise.
        sources: by name, as they were read.
        queues: likewise.
        exporters: likewise.
        sinks: likewise.
        pipelines: likewise.
        content: everything, as the file, the environment and --set make it, without a default.
        origins: where each value of `content` was set, by its path with dots.
    """

    name: str
    file: Path
    service: Mapping[str, Any] = field(default_factory=dict[str, Any])
    observe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    logs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sources: Mapping[str, Located] = field(default_factory=dict[str, Any])
    queues: Mapping[str, Located] = field(default_factory=dict[str, Any])
    exporters: Mapping[str, Located] = field(default_factory=dict[str, Any])
    sinks: Mapping[str, Located] = field(default_factory=dict[str, Any])
    pipelines: Mapping[str, Located] = field(default_factory=dict[str, Any])
    content: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origins: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def drain_timeout(self) -> float:
        """Seconds that a stop may take."""
        return float(self.service.get("drain_timeout", 30.0))

    def things(self) -> Iterator[tuple[str, str, Located]]:
        """Everything that has a name: its section, its name, what was read."""
        for section in SECTIONS:
            for name, each in getattr(self, section).items():
                yield section, name, each

    def counts(self) -> str:
        """How many there are of everything, in words.

        Example:
            >>> from pathlib import Path
            >>> ServiceSpec(name="orders", file=Path("orders.yaml")).counts()
            'nothing'
        """
        counts = {each: len(getattr(self, each)) for each in SECTIONS}
        said = [f"{count} {name if count != 1 else name[:-1]}" for name, count in counts.items() if count]
        return ", ".join(said) or "nothing"
