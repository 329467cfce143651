"""Layer 9: tools on run directories and policies: compare, diagnose, report, replay, evaluate."""
