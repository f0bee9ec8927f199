"""Speculators: what proposes drafts."""
