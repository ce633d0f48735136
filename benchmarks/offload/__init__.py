"""Offload and compression: plans with a disk and codecs, executed; what lossy codecs do to maps and to training."""
