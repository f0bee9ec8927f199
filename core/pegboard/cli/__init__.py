"""The command line. Each command lives in a module of its own, which is imported when the command runs."""
