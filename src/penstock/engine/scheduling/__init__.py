"""Scheduling: requests wait, run and end; each step is planned here."""
