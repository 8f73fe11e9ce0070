"""How many operators, waits and copied bytes a step asks of a GPU, counted without one."""
