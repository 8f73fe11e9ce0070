"""What the planner says, beside what is measured."""
