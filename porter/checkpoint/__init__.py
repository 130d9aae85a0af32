"""Safetensors checkpoints: read without being trusted, converted in bounded memory, written whole or not at all."""
