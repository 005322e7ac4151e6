"""tcil inside other frameworks, where those are installed."""
