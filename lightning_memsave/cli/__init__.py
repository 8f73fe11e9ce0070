"""The command `memsave`, one file per subcommand, and `MemSaveCLI` for LightningCLI projects."""
