"""Built-in environments; each is a plugin like anyone else's."""
