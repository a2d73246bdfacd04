"""Questions asked of jaxpp, one folder each."""
