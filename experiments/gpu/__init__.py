"""What does jaxpp do on a GPU? All claims that need an accelerator, in one command."""
