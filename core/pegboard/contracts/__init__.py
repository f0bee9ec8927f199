"""Typed contracts, one small file per role: records and abstract classes, no logic, no torch at import.

The version of each role stands in `part.CONTRACT_VERSIONS`; docs/contracts.md argues why they are as they are.
"""
