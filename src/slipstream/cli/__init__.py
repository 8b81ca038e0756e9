"""Commands of the `slipstream` command line."""
