"""Deployments of several instances: rank tables, and signed HTTP requests between router and instances."""
