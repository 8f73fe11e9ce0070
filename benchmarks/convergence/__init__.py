"""Whether each stack learns as much as training in float32 does."""
