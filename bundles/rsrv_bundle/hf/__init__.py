"""Export of directories that `save_pretrained` of Hugging Face's libraries or sentence-transformers wrote."""
