"""How configuration is declared and read; the fields themselves live beside their owners."""
