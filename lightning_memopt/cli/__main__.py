"""`python -m lightning_memopt.cli`: the same as `memopt`."""

import sys

from lightning_memopt.cli import main

sys.exit(main())
