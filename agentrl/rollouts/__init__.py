"""The activity of producing episodes: sessions, scaffold contexts, runners and workers."""
