"""Configuration: the schema of the options, their sources, other systems' names for them, and the log."""
