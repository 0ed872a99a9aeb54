"""Fast ways of computing what a plain PyTorch expression would, each with that expression beside it."""
