"""Text on both sides of the model: tokeniser, chat template, messages, and text back from tokens."""
