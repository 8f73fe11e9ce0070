"""The settings of `MemSaveCallback`: a file for each argument, named as it is."""
