"""Records that flow between components: frozen dataclasses on the standard library and numpy."""
