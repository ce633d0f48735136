"""A forward: where it begins and ends, which calls of the model belong to it, and the contexts that record it.

Enter through `Rounds` (round.py), `Sequence` (sequence.py), `signature_of` (shapes.py), `Recording` and `PlannedRecording`
(recording.py).
"""
