"""The models that an API process serves, and its connection to the supervisor."""
