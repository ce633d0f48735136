"""The report of a run or a plan (lightning_memopt/report): its record, its page, the fronts that write it, a real browser."""
