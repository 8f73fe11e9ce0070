"""What stays on a GPU if the rest waits on the host, and what it costs on this machine."""
