"""`python -m lightning_memopt.cli`, which is `memopt`."""

import sys

from lightning_memopt.cli import main

sys.exit(main())
