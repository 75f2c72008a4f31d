"""Scoring models and comparing runs."""
