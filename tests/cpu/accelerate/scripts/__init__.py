"""Training scripts in the style of Accelerate's examples. None of them knows of this package."""
