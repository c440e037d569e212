"""The command line: `specdec`."""
