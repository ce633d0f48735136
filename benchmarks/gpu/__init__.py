"""What runs on a GPU, beside stock tools: `gpu` is the command, one module for each of its subcommands."""
