"""The processes of a server: the supervisor, and the API processes and engines that it runs."""
