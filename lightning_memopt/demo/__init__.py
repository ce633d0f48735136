"""Two small real trainings whose step is mostly activations: a character GPT (`chargpt`) and a ResNet (`digits`).

Both need no download and run on two CPU cores in about a minute. Each module gives the same names: a frozen settings
class with a `quick()` variant, `build(seed, settings)` for plain torch, `loss_of(model, batch)`, and a LightningModule
with its LightningDataModule. Only these modules import Lightning or scikit-learn here.
"""
