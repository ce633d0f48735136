"""Helpers of these tests: models, loops, fits, fakes of devices, and scripts that tests run in processes of their own."""
