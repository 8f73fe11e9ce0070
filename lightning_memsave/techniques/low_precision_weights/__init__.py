"""Keep weights in bfloat16, with updates that are not lost in rounding."""
