"""Rates and energy (lightning_memopt/telemetry, callbacks/monitor.py): sources, the meter, the monitor."""
