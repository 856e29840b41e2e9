"""Other protocols over the same path through the engine: OpenAI's Responses and Anthropic's Messages."""
