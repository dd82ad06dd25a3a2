"""Between text and tokens: tokenizers, chat formats, and tokenizers made on the spot."""
