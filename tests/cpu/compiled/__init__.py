"""Models that their user compiles (lightning_memopt/compiled)."""
