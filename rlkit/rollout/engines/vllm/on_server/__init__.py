"""What a vLLM server on a CPU imports: this folder is on its path, and no rlkit is needed there."""
