"""The tokenizer: chats and texts to token ids, within the context limit."""
