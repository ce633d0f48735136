"""Whether a training step fits on a card: it is recorded without its bytes, and planned for cards that are not here."""
