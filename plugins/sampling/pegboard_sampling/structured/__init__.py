"""Structured output: texts that match a JSON schema, a regular expression or a grammar."""
