"""What may be removed without any difference, and why."""

EQUIVALENT: dict[str, str] = {}
