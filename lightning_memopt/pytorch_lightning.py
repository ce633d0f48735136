"""The public classes for `import pytorch_lightning` and `import lightning_fabric`."""

from lightning_memopt.integrations.lightnings import names_for

__getattr__ = names_for(__name__)
