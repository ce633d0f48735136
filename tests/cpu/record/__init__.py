"""Recording a step (lightning_memopt/record): rules of ops, sweeps over torch's own tables, settings, copies."""
