"""Advantage estimators: rewards, groups and values in; one advantage per token out."""
