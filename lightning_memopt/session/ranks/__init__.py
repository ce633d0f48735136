"""What all ranks of a distributed run decide together.

Enter through `Agreement` (agreement.py).
"""
