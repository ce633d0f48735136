"""What freed memory becomes: the largest batch on a device, and samples a second at equal budget, predicted for a card."""
