"""Scheduling: admission, the waiting queue, planning of steps, preemption, and the processing of their outputs."""
