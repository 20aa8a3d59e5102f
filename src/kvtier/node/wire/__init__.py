"""Messages between an engine and a node, and the socket that carries them."""
