"""Measure time, energy and memory of any training loop. Depends neither on Lightning nor on plans."""

from lightning_memopt.telemetry.energy import EnergyMeter
from lightning_memopt.telemetry.meter import Meter
from lightning_memopt.telemetry.nvml import nvml_source
from lightning_memopt.telemetry.rapl import rapl_sources
from lightning_memopt.telemetry.throughput import Energy, Tally, Throughput, read_throughput

__all__ = ["Energy", "EnergyMeter", "Meter", "Throughput", "Tally", "nvml_source", "rapl_sources", "read_throughput"]
