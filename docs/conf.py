"""Sphinx configuration: ``make docs``."""

from importlib.metadata import version

project = "mpidist"
author = "the mpidist authors"
release = version("mpidist")
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
numpydoc_show_class_members = False
html_theme = "pydata_sphinx_theme"
exclude_patterns = ["_build"]
autodoc_mock_imports = ["cupy"]
suppress_warnings = ["myst.xref_missing"]
myst_heading_anchors = 3
