"""Reading and writing models in files of Hugging Face, without torch."""
