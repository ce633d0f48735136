"""`accelerate launch -m lightning_memopt.launch --budget 8GiB train.py ...`, and the same with torchrun."""

from lightning_memopt.integrations.launch import main

if __name__ == "__main__":
    main()
