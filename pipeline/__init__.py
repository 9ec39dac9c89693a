"""The command line and the configuration that composes cache and train."""
