"""The HTTP server: OpenAI-compatible routes over engines in processes of their own."""
