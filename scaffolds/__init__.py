"""Built-in scaffolds; each is a plugin like anyone else's."""
