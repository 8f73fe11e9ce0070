"""Update each parameter as soon as its gradient is there."""
