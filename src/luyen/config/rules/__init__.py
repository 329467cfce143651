"""Cross-field rules: one small function each, with an id, a severity, a reason and a fix."""
