"""The public classes for `import lightning`. If only `lightning` is imported, `lightning_memopt` has the same classes."""

from lightning_memopt.integrations.lightnings import names_for

__getattr__ = names_for(__name__)
