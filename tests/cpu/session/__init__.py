"""A session (lightning_memopt/session): budgets, states, the plan cache, which plan is solved for, status, warnings."""
