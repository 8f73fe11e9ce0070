"""A batch in smaller parts."""
