"""The engine as a process: its server loop, its client, its launcher and the messages between them."""
