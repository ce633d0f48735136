"""Addresses for buffers: instances with a known perfect packing, and recorded steps."""
