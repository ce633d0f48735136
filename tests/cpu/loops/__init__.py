"""Plain loops in `optimize` (lightning_memopt/integrations): any shape of loop gives the bits of the plain run."""
