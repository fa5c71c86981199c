"""Sphinx configuration: ``make docs``."""

import importlib.metadata
import sys
from pathlib import Path

import mpi4py

sys.path.insert(0, str(Path(__file__).parent))
from reference import filled

# Without MPI_Init: Open MPI would leave a file in /dev/shm after each build.
mpi4py.rc.initialize = mpi4py.rc.finalize = False

project = "mpidist"
author = "the mpidist authors"
release = importlib.metadata.version("mpidist")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
exclude_patterns = ["_build"]
autodoc_mock_imports = ["cupy"]
suppress_warnings = ["myst.xref_missing"]
myst_heading_anchors = 3


def setup(app):
    """Let the code say what stands in place of ``<!-- NAME -->``: see reference.py."""

    def fill(app, page, source):
        source[0] = filled(source[0])

    app.connect("source-read", fill)
