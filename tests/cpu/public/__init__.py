"""What users type and read: the `memopt` command (cli.py, demo), the types of public names, generated pages."""
