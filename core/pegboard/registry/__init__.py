"""How plugins are found, checked, chosen and explained. See docs/plugins.md for the author's side.

Kept free of imports, so that a manifest which needs `pegboard.registry.hookspecs` stays light.
"""
