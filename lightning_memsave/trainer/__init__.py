"""Access Trainers of both Lightning packages."""
