"""Sphinx configuration: ``make docs``."""

import importlib.metadata

project = "mpidist"
author = "the mpidist authors"
release = importlib.metadata.version("mpidist")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
exclude_patterns = ["_build"]
autodoc_mock_imports = ["cupy"]
suppress_warnings = ["myst.xref_missing"]
myst_heading_anchors = 3
