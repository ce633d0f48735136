"""What all ranks of a distributed run decide together.

Door: `Agreement` (agreement.py).
"""
