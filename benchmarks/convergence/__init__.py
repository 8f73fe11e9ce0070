"""Whether each preset learns as much as training in float32 does."""
