"""Export of directories of Hugging Face: what `save_pretrained` and sentence-transformers write becomes a bundle."""
