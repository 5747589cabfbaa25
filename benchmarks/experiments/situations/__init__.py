"""Ordinary mistakes and situations, and what the audit answers to each."""
