"""OpenAI's Realtime protocol over WebSocket: its text part."""
