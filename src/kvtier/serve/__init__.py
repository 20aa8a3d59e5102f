"""The embedded engine, and its server with OpenAI's API."""
