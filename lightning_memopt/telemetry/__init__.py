"""What a training run takes: time, energy, memory. For any loop: no Lightning here."""

from lightning_memopt.telemetry.energy import EnergyMeter
from lightning_memopt.telemetry.meter import Meter
from lightning_memopt.telemetry.nvml import nvml_source, uuid_of
from lightning_memopt.telemetry.rapl import rapl_sources
from lightning_memopt.telemetry.rates import Energy, Rates, Tally, read_rates

__all__ = ["Energy", "EnergyMeter", "Meter", "Rates", "Tally", "nvml_source", "rapl_sources", "read_rates", "uuid_of"]
