"""Images in prompts: encoded before their prompts are read, kept by content, put in the place of tokens."""
