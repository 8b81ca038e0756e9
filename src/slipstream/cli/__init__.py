"""The subcommands of the `slipstream` command."""
