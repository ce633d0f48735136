"""The native counter (lightning_memopt/native): every byte of the process, and the peaks that it measures."""
