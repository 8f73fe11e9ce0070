"""How exact predictions are, and how long they take."""
