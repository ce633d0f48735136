"""The promises of docs/promises.md: names of tests by id."""
