"""Images of chats: fetched, decoded and brought to the size that their model reads, and put into the prompt."""
