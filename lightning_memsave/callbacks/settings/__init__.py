"""The settings of `MemSaveCallback`: a file for each argument, with its name."""
