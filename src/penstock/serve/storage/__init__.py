"""Stored responses, conversations, files and batches, in a SQL database. Requires the extra ``storage``."""
