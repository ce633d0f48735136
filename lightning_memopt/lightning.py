"""The public classes for `import lightning`. Where only `lightning` is imported, `lightning_memopt` has the same."""

from lightning_memopt.integrations.lightnings import names_for

__getattr__ = names_for(__name__)
