"""Update each parameter in backward as soon as its gradient is complete."""
