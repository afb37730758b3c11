"""One engine: a scheduler, a runner and a clock, stepped one iteration at a time."""
