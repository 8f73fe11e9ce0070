"""Another optimizer, by its name, for the groups of the configured one."""
