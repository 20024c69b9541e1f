"""The engine process: its server loop, client, launcher, and the messages between them."""
