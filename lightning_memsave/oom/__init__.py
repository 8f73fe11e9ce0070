"""Why memory ran out: the message, the diagnosis, the advice and the report."""
