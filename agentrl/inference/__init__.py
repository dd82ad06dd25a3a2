"""The client side of SGLang's native protocol, and the formats that both sides share."""
