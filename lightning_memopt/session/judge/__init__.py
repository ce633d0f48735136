"""What becomes of a plan after each step: it is kept, replaced by a smaller one, or the step is observed again.

Enter through `Running` (states.py).
"""
