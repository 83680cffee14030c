"""Secrets in files, looked at from time to time: one that has changed lets what waited for it try again at once.

Sinks read their credentials when they connect, so they use a new one by themselves. What is read once, such as a
URL, is named in the log: it needs a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from batchqueue_async._support import log
from batchqueue_async.service.building import is_read_later
from batchqueue_async.service.file.rules import is_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchqueue_async.export.exporter import Exporter
    from batchqueue_async.service.file.spec import ServiceSpec

Stamp = tuple[int, int, int] | None


class SecretWatch:
    """The files that a service's values refer to.

    Attributes:
        files: by path, the fields that refer to it: section, name and field of each.
    """

    def __init__(self, spec: ServiceSpec, exporters: Mapping[str, Exporter]) -> None:
        self._every: float = spec.service.get("secrets_every", 5.0)
        self._exporters = exporters
        self._users = {name: spec.exporters[name].values.get("sink") for name in exporters}
        self.files: dict[str, list[tuple[str, str, str]]] = {}
        for section, name, thing in spec.things():
            for field, value in thing.values.items():
                for reference in _references(value):
                    if reference.startswith("file:"):
                        self.files.setdefault(reference.removeprefix("file:"), []).append((section, name, field))
        self._stamps = {path: stamp_of(path) for path in self.files}

    async def run(self) -> None:
        """Look until cancelled."""
        while self.files:
            await asyncio.sleep(self._every)
            self.look()

    def look(self) -> list[str]:
        """The files that have changed since the last look; what uses them tries again."""
        changed: list[str] = []
        for path in self.files:
            stamp = stamp_of(path)
            if stamp != self._stamps[path]:
                self._stamps[path] = stamp
                changed.append(path)
                self._tell(path, gone=stamp is None)
        return changed

    def _tell(self, path: str, *, gone: bool) -> None:
        uses = self.files[path]
        named = [".".join(each) for each in uses]
        if gone:
            log.warning("secret_gone", file=path, used_by=named, way_out="write it again; nothing is dropped meanwhile")
            return
        once = [".".join(each) for each in uses if not is_read_later(each[2])]
        log.info("secret_changed", file=path, used_by=named)
        if once:
            log.warning("secret_needs_restart", file=path, used_by=once, way_out="restart: these are read at the start")
        sinks = {name for section, name, _ in uses if section == "sinks"}
        for name, exporter in self._exporters.items():
            if self._users[name] in sinks and not exporter.closed:
                exporter.resume()


def stamp_of(path: str) -> Stamp:
    """What tells one content of a file from another, without reading it; None where it is not there."""
    try:
        about = Path(path).stat()  # of what a link leads to: Kubernetes changes the link
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino, about.st_size


def _references(value: Any) -> Iterator[str]:
    if is_reference(value):
        yield value
    elif isinstance(value, Mapping):
        for each in cast("Mapping[str, Any]", value).values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in cast("list[object]", value):
            yield from _references(each)
