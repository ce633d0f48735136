"""The compiled regions of a model: which of them run ops again, and when they are compiled again.

Enter through `CompiledRegions` (compiled_regions.py), `CompiledBlocks` (compiling.py).
"""
