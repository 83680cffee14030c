"""How Sphinx builds these documents: `make docs`."""

from __future__ import annotations

import inspect
import logging
import sys
import typing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import batchqueue_async
from batchqueue_async import intake, service, testing

sys.path.insert(0, str(Path(__file__).parent))  # Sphinx runs this file from elsewhere

import from_tree
from public_names import INTERNAL, PAGES

if TYPE_CHECKING:
    from types import ModuleType

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "batchqueue_async"
author = "The batchqueue_async maintainers"
version = release = batchqueue_async.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output are not copied
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
default_role = "literal"  # the docstrings' single backticks
# A section that has no pages yet is no mistake; the warning has no type by which suppress_warnings could name it.
logging.getLogger("sphinx.sphinx.directives.other").addFilter(
    lambda record: getattr(record, "subtype", None) != "empty_glob"
)

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "inherited-members": "Exception,BaseException,Enum,Generic,Protocol"}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "batchqueue_async"
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

# -- the reference: a page for each area, made from the public names, so that none is missing --

AREAS = [
    ("configuration", "Configuration", ("config", "policies")),
    ("queue", "Queue", ("queue", "config.handlers", "_support")),
    ("manager", "Manager, schedulers and bridge", ("runtime", "bridge")),
    ("errors", "Errors", ("errors",)),
    ("durable", "Durable queue", ("durable", "leases")),
    ("export", "Export", ("export", "sinks")),
    ("spark", "Spark", ("spark",)),
]
OTHER = ("other", "Other")


def area_of(name: str) -> tuple[str, str]:
    """The page, and its title, of a public name; the longest matching part of its module's path decides."""
    module: str = getattr(getattr(batchqueue_async, name), "__module__", "").removeprefix("batchqueue_async.")
    matching = [
        (len(prefix), page, title)
        for page, title, prefixes in AREAS
        for prefix in prefixes
        if module == prefix or module.startswith((f"{prefix}.", f"{prefix}_"))
    ]
    # An alias such as Handler is of no module of ours: the types of configuration values are of that kind.
    found = max(matching, default=None)
    return found[1:] if found else AREAS[0][:2] if typing.get_args(getattr(batchqueue_async, name)) else OTHER


def entry(module: ModuleType, name: str) -> list[str]:
    """The directive for one name."""
    value: Any = getattr(module, name)
    kind = "autoclass" if inspect.isclass(value) else "autofunction" if inspect.isroutine(value) else "autodata"
    if isinstance(value, type) and issubclass(value, BaseException):
        kind = "autoexception"
    options = ["   :no-value:"] if kind == "autodata" else []
    return [f".. {kind}:: {module.__name__}.{name}", *options, ""]


def write_modules(path: Path, title: str, names: dict[str, tuple[str, ...]]) -> None:
    """One page with the names of several modules, a section for each where there are several."""
    lines = [title, "=" * len(title), ""]
    for module, listed in names.items():
        if len(names) > 1:
            lines += [f"``{module}``", "-" * (len(module) + 4), ""]
        for name in listed:
            lines += entry(import_module(module), name)
    text = "\n".join(lines)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def is_internal(_app: Sphinx, _what: str, _name: str, value: Any, _skip: bool, _options: object) -> bool | None:  # noqa: FBT001 - Sphinx's signature
    """Leave out what only the library's other parts call; None lets Sphinx decide."""
    function = value.fget if isinstance(value, property) else value
    return True if getattr(function, "__qualname__", "") in INTERNAL else None


def write_page(path: Path, title: str, module: ModuleType, names: list[str]) -> None:
    """One page of the reference: a table of the names, then each of them."""
    lines = [title, "=" * len(title), "", f".. currentmodule:: {module.__name__}", "", ".. autosummary::", ""]
    lines += [f"   {name}" for name in names]
    lines += ["", *(line for name in names for line in entry(module, name))]
    text = "\n".join(lines)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_reference(app: Sphinx) -> None:
    """Write all pages of the reference."""
    directory = Path(app.srcdir) / "reference" / "api"
    directory.mkdir(exist_ok=True)
    pages: dict[tuple[str, str], list[str]] = {}
    for name in batchqueue_async.__all__:
        if not inspect.ismodule(getattr(batchqueue_async, name)):
            pages.setdefault(area_of(name), []).append(name)
    for number, (page, title) in enumerate([*((page, title) for page, title, _ in AREAS), OTHER]):
        if (page, title) in pages:
            write_page(directory / f"{number}-{page}.rst", title, batchqueue_async, pages[page, title])
    write_page(directory / "9-service.rst", "batchqueue_async.service", service, service.__all__)
    write_page(directory / "8-intake.rst", "batchqueue_async.intake", intake, intake.__all__)
    for page, (title, names) in PAGES.items():
        write_modules(directory / f"{page}.rst", title, names)
    write_page(directory / "9-testing.rst", "batchqueue_async.testing", testing, testing.__all__)


def fill_page(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Put the parts that come from the tree into a page."""
    source[0] = from_tree.fill(source[0])


def pages_from_the_tree(_app: Sphinx, env: BuildEnvironment, *_: object) -> list[str]:
    """These pages are read again at every build: what they are made from may have changed."""
    return [name for name in env.found_docs if from_tree.MARK.search(Path(env.doc2path(name)).read_text())]


def setup(app: Sphinx) -> None:
    """Let Sphinx write the reference before it reads it, and fill the pages as it reads them."""
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-skip-member", is_internal)
    app.connect("env-get-outdated", pages_from_the_tree)
    app.connect("source-read", fill_page)
