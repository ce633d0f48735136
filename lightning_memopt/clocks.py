"""The clocks of this process, as they are when the package is imported.

A script or test that replaces a clock of the module `time`, say by a list of as many readings as it needs, keeps its readings.
"""

from time import monotonic, perf_counter, process_time, thread_time

__all__ = ["monotonic", "perf_counter", "process_time", "thread_time"]
