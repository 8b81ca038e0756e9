"""The commands of the `slipstream` command line."""
