"""The engine (lightning_memopt/runtime/engine): rebuilding, matching, templates, rejoining, memory written too late."""
