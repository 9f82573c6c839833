"""Models: checkpoints, the decoder, tokenizers, chat templates."""
