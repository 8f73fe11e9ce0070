"""The questions that people ask: what will it take, what takes it, what has changed, what helps."""
