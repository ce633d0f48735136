"""What runs on a GPU, beside stock tools: `gpu` is the command, `parts` what it runs, `measure` the process of a benchmark."""
