"""What proposes tokens: models, blocks, texts, the host."""
