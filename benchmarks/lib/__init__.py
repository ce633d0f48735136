"""What commands share: a model with its measurements, prices of a card, tables, plots, and where results are written."""
