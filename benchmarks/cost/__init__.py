"""What the package itself costs: recording an op, and counting an allocation."""
