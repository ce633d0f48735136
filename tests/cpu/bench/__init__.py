"""`memopt bench` (lightning_memopt/bench): every method has its row, and what a row says is measured."""
