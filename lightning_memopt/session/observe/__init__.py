"""Observed steps: real steps, recorded op by op, and the graph that a plan is made for.

Enter through `ObservedStep` (observed_step.py) observes one step at a time; `Observing` (observing.py) collects the graphs of a
signature.
"""
