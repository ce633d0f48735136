"""The hazards of docs/hazards.md: files by group, names of tests by id."""
