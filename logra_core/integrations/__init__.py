"""LoGRA inside other people's trainers."""
