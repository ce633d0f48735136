"""The planned pool: the requests of a step get addresses in one arena. They were planned from the log of an earlier step.

steps    what was logged of a step
windows  which window of a native pool is open: steps are logged, then planned
streams  on CUDA: the windows of each stream
"""

from lightning_memopt.runtime.pool.steps import ALIGNMENT, LoggedStep, Request
from lightning_memopt.runtime.pool.streams import StreamWindows
from lightning_memopt.runtime.pool.windows import PoolStatus, PoolWindows, Solve

__all__ = ["ALIGNMENT", "LoggedStep", "PoolStatus", "PoolWindows", "Request", "Solve", "StreamWindows"]
