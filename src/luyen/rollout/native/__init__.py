"""The embedded engine: it samples with the very modules that are being trained."""
