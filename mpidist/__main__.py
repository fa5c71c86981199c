"""``python -m mpidist`` runs the command ``mpidist``."""

import sys

from .cli.main import main

sys.exit(main())
