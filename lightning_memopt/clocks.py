"""The clocks of this process, taken when the package is imported.

If a script or test replaces a clock of the module `time`, say by a fixed list of readings, this package uses up none of them.
"""

from time import monotonic, perf_counter, process_time, thread_time

__all__ = ["monotonic", "perf_counter", "process_time", "thread_time"]
