"""The models served by an API process, and its connection to the supervisor."""
