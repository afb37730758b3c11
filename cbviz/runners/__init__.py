"""What executes a plan: made-up tokens (`sim`) or a real model (`torch_runner`).

A `SchedulerOutput` is all that a runner gets.
"""
