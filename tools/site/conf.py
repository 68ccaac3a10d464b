"""Sphinx's configuration. Markdown is read as GitHub reads it, and a link that leads nowhere is an error."""

from typing import Final

project: Final = "kvpressure"
extensions: Final = ["myst_parser"]
root_doc: Final = "README"
source_suffix: Final = {".md": "markdown"}
myst_heading_anchors: Final = 4
suppress_warnings: Final = ["myst.header", "misc.highlighting_failure"]
smartquotes: Final = False  # two hyphens begin an option
highlight_language: Final = "text"
html_theme: Final = "furo"
html_title: Final = "kvpressure"
html_static_path: Final = ["_static"]
html_css_files: Final = ["wide.css"]
html_copy_source: Final = False
html_show_sphinx: Final = False
html_show_copyright: Final = False
