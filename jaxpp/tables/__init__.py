"""Tables as text that fits the terminal, and as HTML for notebooks and pages."""
