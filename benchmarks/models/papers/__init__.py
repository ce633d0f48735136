"""Networks of published papers as graphs, computed from their shapes: no framework, no machine."""
