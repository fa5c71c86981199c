"""``python -m mpidist`` is ``mpidist``."""

import sys

from .cli.main import main

sys.exit(main())
