"""Chats to prompts: templates, what each template can render, and control tokens in what users write."""
