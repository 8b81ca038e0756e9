"""Subcommands of the `slipstream` command."""
