"""The scheduler: which requests run, and what each step computes for whom."""
