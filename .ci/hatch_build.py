"""Build the extension into the wheel, or beside its source for an editable install; without a compiler go on without.

BATCHQUEUE_NO_EXTENSIONS=1    build none: the package is then pure Python
BATCHQUEUE_NO_EXTENSIONS=0    a build that fails is an error, for those who publish wheels
BATCHQUEUE_SANITIZE=1         with AddressSanitizer and UndefinedBehaviorSanitizer, for `make test-native`
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("batchqueue_async", "_native")
NAME = "batchqueue_async._native.hotpath"


class CustomBuildHook(BuildHookInterface):
    """Hatchling's hook of the name that it looks for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, before hatchling collects the files."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        target = root / FOLDER / f"hotpath{sysconfig.get_config_var('EXT_SUFFIX')}"
        target.unlink(missing_ok=True)
        wanted = os.environ.get("BATCHQUEUE_NO_EXTENSIONS", "")
        if wanted not in {"", "0"} or sysconfig.get_config_var("Py_GIL_DISABLED"):
            return
        try:
            built = build(root)
        except Exception as error:  # whatever is missing or fails: the package works without
            if wanted == "0":
                raise
            self.app.display_warning(f"the hot path is not compiled, and runs as Python: {error}")
            return
        shutil.copy(built, target)
        if version != "editable":
            build_data["force_include"][str(target)] = str(FOLDER / target.name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def build(root: Path) -> Path:
    """The built file, in a folder for scraps."""
    from setuptools import Distribution, Extension  # noqa: PLC0415 - it may be what is missing
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415 - only where something is built

    if sys.platform == "win32":
        options: list[str] = []
    else:
        options = ["-O3", "-std=c11", "-Wall", "-Wextra", "-Wno-cast-function-type", "-Wno-missing-field-initializers"]
        # Two pointers that are cleared in one wide store, and read one by one soon after, hold the processor up.
        options.append("-fno-tree-slp-vectorize")
    links: list[str] = []
    if os.environ.get("BATCHQUEUE_SANITIZE", "0") not in {"", "0"}:
        options += ["-O1", "-g", "-UNDEBUG", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
        links += ["-fsanitize=address,undefined"]
    source = str(root / FOLDER / "hotpath.c")
    extension = Extension(NAME, [source], extra_compile_args=options, extra_link_args=links)
    scraps = tempfile.mkdtemp(prefix="batchqueue-build-")
    command = build_ext(Distribution({"name": "batchqueue-async", "ext_modules": [extension]}))
    command.build_lib = command.build_temp = scraps
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(NAME))
