"""Updates of single parameters while backward runs."""
