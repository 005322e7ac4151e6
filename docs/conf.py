"""The documentation site: `make docs` builds it into build/docs, with warnings as errors and without network."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx

import tcil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
EXAMPLES = ROOT / "examples" / "gallery"
sys.path.insert(0, str(EXAMPLES))  # the module that examples share
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files beside this folder that are pages of the site.
OUTSIDE = {
    "CONTRIBUTING.md": "/guides/contributing.md",
    "CHANGELOG.md": "/appendix/changelog.md",
    "SECURITY.md": "/appendix/security.md",
}

project, author = "tcil", "The tcil developers"
copyright = "the tcil developers"
version = release = tcil.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["_templates", "results/**/*.json", "gallery/*.ipynb", "gallery/searchindex"]
suppress_warnings = ["config.cache", "misc.highlighting_failure"]  # plain text among commands is no mistake
default_role = "code"
highlight_language = "bash"  # of blocks that name none: commands

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints = "none"  # numpydoc's sections have them
autodoc_mock_imports = ["avalanche", "lightning", "onnx", "onnxruntime", "onnxscript", "transformers"]  # not installed
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

sphinx_gallery_conf = {
    "examples_dirs": str(EXAMPLES),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"letters_tasks\.py|__init__\.py",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 1_000_000,  # times differ from machine to machine
    "write_computation_times": False,
    "image_scrapers": ("matplotlib",),
    "remove_config_comments": True,
    "nested_sections": False,
}
warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")

html_theme = "pydata_sphinx_theme"
html_title = "tcil"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_nav_level": 1,
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "footer_start": ["copyright"],
    "footer_end": [],
    "search_bar_text": "Search",
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": []}
html_context = {"default_mode": "auto"}
html_math_renderer = "mathml"


def _inline_math(self: Any, node: nodes.math) -> None:
    self.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block_math(self: Any, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=True))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def _pages_of(text: str) -> set[str]:
    """The pages that tables of contents name, from the top folder of the site."""
    blocks = re.findall(r"```{toctree}\n(.*?)```", text, flags=re.DOTALL)
    return set(re.findall(r"/[\w/-]+(?=>?$)", "\n".join(blocks), flags=re.MULTILINE))


def _as_on_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links that lead out of this folder, and the entries of pages that may be missing.

    In a table of contents `optional /page` (or a pattern) is an entry if there is such a page, and `all other pages`
    stands for those at the top of the folder that no table of contents names.
    """
    text = source[0]
    for outside, inside in OUTSIDE.items():
        text = re.sub(rf"\]\((?:\.\./)*{outside}(?=[)#])", f"]({inside}", text)
    text = re.sub(r"\]\((?:\.\./)*docs/", "](/", text)
    text = re.sub(r"\]\((?:\.\./)*examples/gallery/(plot_\w+)\.py\)", r"](/gallery/\1.rst)", text)
    for entry, pattern in re.findall(r"^(optional /(.+))$", text, flags=re.MULTILINE):
        there = sorted(HERE.glob(f"{pattern}.md"))
        text = text.replace(f"{entry}\n", "".join(f"/{path.relative_to(HERE).with_suffix('')}\n" for path in there))
    if "\nall other pages\n" in text:
        named = set().union(*(_pages_of(path.read_text()) for path in HERE.rglob("index.md")))
        others = sorted({f"/{path.stem}" for path in HERE.glob("*.md")} - named - {"/index"})
        text = text.replace("all other pages\n", "".join(f"{page}\n" for page in others))
    source[0] = text


def setup(app: Sphinx) -> None:
    """Formulas as MathML, which browsers draw themselves: no script and no font to download."""
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("source-read", _as_on_the_site)
    app.connect("include-read", lambda app, path, docname, source: _as_on_the_site(app, docname, source))
