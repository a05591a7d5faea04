"""Builds the documentation as a site, from the pages of the repository: `make docs`.

The source folder is the repository, so that links between pages, results and files are the same in the site and in the
repository itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

project = "anysize"
html_title = "anysize"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md", "experiments/**.md"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page may begin where another ends

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False
default_role = "code"  # docstrings write code in single back quotes
napoleon_numpy_docstring = False
napoleon_use_ivar = True
viewcode_line_numbers = True


def mathml(self: Any, node: nodes.math | nodes.math_block) -> None:
    """Write mathematics as MathML, which browsers show without a script and without a network."""
    block = isinstance(node, nodes.math_block)
    tree = latex2mathml.tex2mathml(node.astext(), as_block=block)
    self.body.append(f'<div class="math">{tree}</div>' if block else tree)
    raise nodes.SkipNode


def without_folders(app: Sphinx, document: str, source: list[str]) -> None:
    """Leave only the words of a link to a folder, which a site has no page for."""
    source[0] = re.sub(r"\[([^\]]+)\]\([\w./-]+/\)", r"\1", source[0])


def entry_page(app: Sphinx, error: Exception | None) -> None:
    """Write the page that opens when a reader opens the folder."""
    if error is None and app.builder.name == "html":
        start = f"{root_doc}.html"
        lines = ['<!DOCTYPE html><meta charset="utf-8"><title>anysize</title>']
        lines += [f'<meta http-equiv="refresh" content="0; url={start}"><a href="{start}">anysize</a>', ""]
        Path(app.outdir, "index.html").write_text("\n".join(lines), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Sphinx calls it."""
    app.add_html_math_renderer("mathml", inline_renderers=(mathml, None), block_renderers=(mathml, None))
    app.connect("source-read", without_folders)
    app.connect("build-finished", entry_page)
