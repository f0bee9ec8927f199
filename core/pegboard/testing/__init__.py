"""Public test tools for plugin authors. Nothing here is imported by the engine."""
