"""What clients have the server keep, in a SQL database. Needs the extra ``storage``."""
