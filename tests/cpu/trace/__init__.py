"""Observing a step (lightning_memopt/trace): which bytes are alive, who holds them, how fast the link is."""
