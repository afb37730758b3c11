"""The scheduler: plain data and decisions, standard library only.

Knows no tensors, clocks, costs, traces or widgets.
"""
