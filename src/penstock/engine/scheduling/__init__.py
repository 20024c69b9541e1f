"""Scheduling: admission, the waiting queue, planning of steps, preemption, and processing of step outputs."""
