"""What the figures in README and docs come from; never imported by the package."""
